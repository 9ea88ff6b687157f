"""Floats of two bytes as float32, for packets that carry a few bits of each.

The grids of a few bits are of float32, and so is what they decode to. A float of two bytes would
round that again, and what was received and is sent on would no longer be what others have. So a
call's tensors are widened first, and its results narrowed once, when they are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .description import Description, Staged
from .tensors import WIDER, contiguous, spread


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

    def whole() -> None:
        if first is not None:
            first()
        last()

    def of_members(members: Sequence[int]) -> None:
        assert among is not None
        among(members)
        last()

    return staged._replace(
        epilogue=None if among is not None else whole,
        among=None if among is None else of_members,
    )
