"""Bytes that ranks send one another: a state that was packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import CheckpointError
from lossycoll.options.scopes import reliable
from lossycoll.runtime.swarm.state import Bytes

from .packing import packed

MOST_BYTES: Final = 1 << 40
FAILED: Final = -1


def octets(text: bytes) -> Tensor:
    """Bytes as a uint8 tensor (n,) in host memory, a copy."""
    return (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if text
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def state_from(
    source: int, state: Callable[[], Any], group: dist.ProcessGroup | None = None
) -> tuple[bytes, Bytes]:
    """The state of rank ``source`` for all ranks of a group, reliably. All of them call this.

    ``state`` is called at ``source`` alone; the result is for ``unpacked``. A state that can't
    travel raises CheckpointError on all ranks.
    """
    skeleton, data, failure = b"", torch.empty(0, dtype=torch.uint8, device="cpu"), ""
    if dist.get_rank(group) == source:
        try:
            skeleton, array = packed(state())
            data = torch.from_numpy(array)
        except Exception as error:  # of a user's class, whatever it is: all ranks hear of it
            failure = f"{type(error).__name__}: {error}"
    with reliable():
        sizes = torch.tensor([FAILED if failure else len(skeleton), data.numel()], device="cpu")
        dist.broadcast(sizes, group=group, group_src=source)
        text, length = sizes.tolist()
        if text == FAILED:
            raise CheckpointError(failure or f"rank {source} has a state that can't travel")
        if not (0 <= text < MOST_BYTES and 0 <= length < MOST_BYTES):
            raise CheckpointError(f"rank {source} has a state of {text} and {length} bytes")
        bones = _received(octets(skeleton), text, source, group)
        values = _received(data, length, source, group)
    return bones.numpy().tobytes(), values.numpy()


def _received(tensor: Tensor, length: int, source: int, group: dist.ProcessGroup | None) -> Tensor:
    if dist.get_rank(group) != source:
        tensor = torch.empty(length, dtype=torch.uint8, device="cpu")
    if length:
        dist.broadcast(tensor, group=group, group_src=source)
    return tensor
