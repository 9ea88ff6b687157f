"""The caller's tensors as buffers of the engine, and back.

Packets that carry a few bits of each element hold float32. Rounding what was received to a float of
two bytes would change what is sent on, so such a call's tensors are widened first, and its results
narrowed once, when they are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from .description import Description, Staged
from .reduction import Reduction
from .tensors import WIDER, apart, as_real, contiguous, copy_back, flat, room, scaled, spread

NOTHING: Final = torch.empty(0, device="cpu")
"""The buffer of those who neither read nor write."""


def as_they_are(call: Description, reduction: Reduction | None, keep: bool) -> Staged:
    """The first tensor that is read and the first that is written, which must be contiguous."""
    del reduction, keep
    return Staged(call.reads[0], call.writes[0])


def one_buffer(call: Description, reduction: Reduction | None, keep: bool) -> Staged:
    """One buffer that is read and written."""
    del keep
    tensor = call.writes[0]
    if reduction is None:
        buffer = whole = contiguous(tensor)
    else:
        whole = scaled(tensor, reduction.factor)
        if whole is tensor and not tensor.is_complex():
            return Staged(tensor, tensor)
        buffer = as_real(whole)
    return Staged(buffer, buffer, copy_back(whole, tensor))


def two_buffers(call: Description, reduction: Reduction | None, keep: bool) -> Staged:
    """One buffer of all that is read, another of all that is written, in order. Where nothing is
    read, or nothing written, the other one stands for both."""
    source = target = epilogue = None
    if call.reads:
        source = scaled(_joined(call.reads), None if reduction is None else reduction.factor)
    if len(call.writes) == 1:
        target = contiguous(call.writes[0])
        epilogue = copy_back(target, call.writes[0])
    elif call.writes:
        target, epilogue = room(call.writes, kept=keep)
    if source is not None and target is not None:
        source = apart(source, target, call.harmless_overlap)
    source = source if source is not None else target if target is not None else NOTHING
    target = source if target is None else target
    if reduction is not None:
        source, target = as_real(source), as_real(target)
    return Staged(source, target, epilogue)


def gathered(call: Description, reduction: Reduction, rank: int, world: int) -> Staged:
    """Buffers for contributions that are gathered, and reduced where they are."""
    output, source = call.writes[0], scaled(_joined(call.reads), reduction.factor)
    if call.root not in (None, rank):
        return Staged(source, source, among=lambda _: None)
    rows = source.new_empty((world, *output.shape))

    def reduce_here(members: Sequence[int]) -> None:
        spread(reduction.over(rows, members), [output])

    return Staged(source, rows, among=reduce_here)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else flat(tensors)


def widened(call: Description) -> tuple[Description, Callable[[], None]]:
    """The same call on float32 (complex64) copies, and what brings its results back."""
    made: dict[int, Tensor] = {}

    def wide(tensor: Tensor) -> Tensor:
        # Read and written is the same tensor in a call in place.
        if id(tensor) not in made:
            made[id(tensor)] = contiguous(tensor.detach()).to(WIDER[tensor.dtype])
        return made[id(tensor)]

    copy = call._replace(
        reads=[wide(tensor) for tensor in call.reads],
        writes=[wide(tensor) for tensor in call.writes],
        compared=None if call.compared is None else wide(call.compared),
        splits=call.splits and call.splits._replace(factor=2),
        harmless_overlap=None,  # copies share no memory
    )

    def narrow() -> None:
        for buffer, tensor in zip(copy.writes, call.writes, strict=True):
            spread(buffer, [tensor])

    return copy, narrow


def then(staged: Staged, last: Callable[[], None]) -> Staged:
    """The same buffers; ``last`` follows what brings the result to the tensors."""
    first, among = staged.epilogue, staged.among

    def of_members(members: Sequence[int]) -> None:
        if among is not None:
            among(members)
        elif first is not None:
            first()
        last()

    if among is not None:
        return staged._replace(among=of_members)
    return staged._replace(epilogue=lambda: of_members(()))
