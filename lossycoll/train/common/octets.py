"""Bytes that ranks send one another: a state that was packed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def octets(text: bytes) -> Tensor:
    """Bytes as they travel.

    Args:
        text: Any number.

    Returns:
        uint8 (n,), a copy in host memory.
    """
    return (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if text
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def received(
    tensor: Tensor, length: int, source: int, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Broadcasts bytes, reliably where the scope says so.

    Args:
        tensor: uint8 (length,) at the source.
        length: The same on all ranks.
        source: The rank of the group that has them.
        group: None: the default group.

    Returns:
        uint8 (length,).
    """
    if dist.get_rank(group) != source:
        tensor = torch.empty(length, dtype=torch.uint8, device="cpu")
    if length:
        dist.broadcast(tensor, group=group, group_src=source)
    return tensor
