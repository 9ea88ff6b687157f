"""One rank's state for all ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import CheckpointError
from lossycoll.options.scopes import reliable
from lossycoll.train.common.packing import packed, unpacked

MOST_BYTES: Final = 1 << 40
FAILED: Final = -1


class Stateful(Protocol):
    """What has a state: modules, optimizers, schedulers."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


def share(parts: Sequence[Stateful], source: int) -> None:
    """Gives all ranks of the default group the source's state.

    Args:
        parts: The same ones on all ranks.
        source: The rank that has it.

    Raises:
        CheckpointError: A state that can't travel, or isn't of these parts; on all ranks.
        LossyError: The group has failed, or the source is lost.
    """
    own = dist.get_rank() == source
    skeleton, data, failure = b"", torch.empty(0, dtype=torch.uint8), ""
    if own:
        try:
            skeleton, array = packed([part.state_dict() for part in parts])
            data = torch.from_numpy(array)
        except CheckpointError as error:
            failure = str(error)
    with reliable():
        sizes = torch.tensor([FAILED if failure else len(skeleton), data.numel()])
        dist.broadcast(sizes, source)
        text, length = sizes.tolist()
        if text == FAILED:
            raise CheckpointError(failure or f"rank {source} has a state that can't travel")
        if not (0 <= text < MOST_BYTES and 0 <= length < MOST_BYTES):
            raise CheckpointError(f"rank {source} has a state of {text} and {length} bytes")
        bones = _received(torch.tensor(list(skeleton), dtype=torch.uint8), text, source)
        data = _received(data, length, source)
    failed = "" if own else _loaded(parts, bones, data)
    _raise_alike(failed)


def _received(tensor: Tensor, length: int, source: int) -> Tensor:
    if dist.get_rank() != source:
        tensor = torch.empty(length, dtype=torch.uint8)
    if length:
        dist.broadcast(tensor, source)
    return tensor


def _loaded(parts: Sequence[Stateful], skeleton: Tensor, data: Tensor) -> str:
    """Why it couldn't be loaded; empty if it was."""
    try:
        states = unpacked(skeleton.numpy().tobytes(), data.numpy())
        if not isinstance(states, list) or len(states) != len(parts):
            return f"{len(states)} states came, and {len(parts)} parts are here"
        for part, state in zip(parts, states, strict=True):
            part.load_state_dict(state)
    except Exception as error:  # of a user's class, whatever it is: all ranks say so
        return f"{type(error).__name__}: {error}"
    return ""


def _raise_alike(failed: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    told = torch.zeros(world, dtype=torch.uint8)
    told[rank] = bool(failed)
    with reliable():
        dist.all_reduce(told, dist.ReduceOp.MAX)
    if told.any():
        ranks = told.nonzero().flatten().tolist()
        raise CheckpointError(
            f"ranks {ranks} couldn't load the state that was shared; this rank, {rank}: "
            f"{failed or 'it could'}; do all ranks share the same parts in the same order?"
        )
