"""Optimizer state between segments and whole parameters.

A checkpoint has the format of the plain optimizer's ``state_dict()``: by parameter, whole tensors,
whatever the number of ranks that wrote it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .buckets import Segment, Slot

State = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """What a rank tells of its segment of a parameter: elements ``begin`` to ``end`` of that, in
    the order of memory. ``sliced``: state that has an entry for each of these."""

    index: int
    begin: int
    end: int
    sliced: State
    whole: State


def part(segment: Segment, state: Mapping[str, Any], elementwise: Collection[str]) -> Part:
    """``state``: of ``segment``. ``elementwise``: see :func:`cut`."""
    length = segment.end - segment.begin
    sliced, whole = {}, {}
    for key, value in state.items():
        held = value.detach().cpu() if isinstance(value, Tensor) else value
        each = isinstance(value, Tensor) and value.shape == (length,)
        # With a single element the shape can't tell, and the name must.
        target = sliced if each and (length > 1 or key in elementwise) else whole
        target[key] = held
    return Part(segment.slot.index, segment.offset, segment.offset + length, sliced, whole)


def joined(slot: Slot, parts: Sequence[Part]) -> State:
    """The state of a whole parameter from those of all of its segments."""
    length = slot.end - slot.begin
    out: State = {}
    for piece in parts:
        for key, value in piece.whole.items():
            out.setdefault(key, value)
        for key, value in piece.sliced.items():
            if key not in out:
                out[key] = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype)
            out[key].as_strided((length,), (1,))[piece.begin : piece.end] = value
    assert sum(piece.end - piece.begin for piece in parts) == length, (slot, parts)
    return out


def cut(segment: Segment, state: Mapping[str, Any], elementwise: Collection[str]) -> State:
    """The segment's part of a whole parameter's state, which :func:`check_state` has passed.

    ``elementwise``: names of what has an entry for each element.
    """
    slot, out = segment.slot, {}
    for key, value in state.items():
        if not _has_elements(key, value, elementwise):
            out[key] = value.clone() if isinstance(value, Tensor) else value
            continue
        whole = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype)
        flat = whole.copy_(value).as_strided((slot.end - slot.begin,), (1,))
        out[key] = flat[segment.offset : segment.offset + segment.end - segment.begin].clone()
    return out


def check_state(
    state: Mapping[str, Any], shape: tuple[int, ...], elementwise: Collection[str], name: str
) -> None:
    """Raises CheckpointError, naming the parameter, unless ``state`` is that of one of ``shape``."""
    for key, value in state.items():
        if _has_elements(key, value, elementwise) and tuple(value.shape) != shape:
            raise CheckpointError(
                f"the checkpoint's {key} of {name} has shape {tuple(value.shape)}, wanted "
                f"{shape}; it is another model's, or its parameters are in another order"
            )


def _has_elements(key: str, value: object, elementwise: Collection[str]) -> bool:
    """Of a parameter without dimensions only the name can tell."""
    return isinstance(value, Tensor) and (value.dim() > 0 or key in elementwise)


def check_groups(saved: Sequence[Mapping[str, Any]], wanted: Sequence[int], where: str) -> None:
    """Raises CheckpointError unless ``saved`` are groups of ``wanted`` parameters each."""
    found = [len(group["params"]) for group in saved]
    if found != list(wanted):
        raise CheckpointError(
            f"{where}: the checkpoint has {sum(found)} parameters in groups of {found}, wanted "
            f"{sum(wanted)} in groups of {list(wanted)}; make the optimizer with the parameters "
            f"and groups that it was saved with"
        )
