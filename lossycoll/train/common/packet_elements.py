"""What became of the elements of a tensor whose packets a method knows one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from lossycoll.runtime.engine.codecs import rounded

from .staleness import Mask


def as_elements(
    lost: Mask, per_block: int, chunk: int, device: torch.device | None = None
) -> Tensor:
    """Which elements lie in lost blocks.

    Args:
        lost: bool (world, blocks), by owner.
        per_block: Elements of a block.
        chunk: Elements of an owner's chunk, of which the last block may be shorter.
        device: Where the elements are; None: in host memory.

    Returns:
        bool (world * chunk,).
    """
    blocks = torch.from_numpy(lost).to(device=device)
    return blocks.repeat_interleave(per_block, dim=1)[:, :chunk].reshape(-1)


def missed_by_rounding(
    source: Tensor, lost: Mask, sent: Mask, per_block: int, encoding: str
) -> Tensor:
    """What isn't in a mean of a contribution that was sent encoded.

    Args:
        source: float32 (world * n,), what was sent.
        lost: bool (world, blocks), by owner.
        sent: bool (world,), the owners that it was sent to.
        per_block: Elements of a block.
        encoding: How, rounded to the nearest.

    Returns:
        float32 (world * n,).
    """
    out = torch.zeros_like(source)
    chunk = len(source) // len(sent)
    mask = as_elements(lost, per_block, chunk, source.device).view(len(sent), chunk)
    rows = zip(source.view(len(sent), chunk), out.view(len(sent), chunk), mask, strict=True)
    for was_sent, (row, missed, gone) in zip(sent, rows, strict=True):
        if was_sent:
            rounded_to(missed, row, encoding, per_block)
            torch.sub(row, missed.masked_fill_(gone, 0), out=missed)
    return out


def rounded_to(out: Tensor, source: Tensor, encoding: str, per_block: int) -> None:
    """Writes what a receiver makes of elements.

    Args:
        out: float32 (n,), is filled; may be ``source``.
        source: float32 (n,), contiguous as ``out``, and on its device.
        encoding: A name of plan.codec's, that rounds to the nearest.
        per_block: Elements of a packet.
    """
    held = source.cpu()  # codecs work on host memory; what is there is itself
    room = out if out.is_cpu else held
    rounded(encoding, held.data_ptr(), room.data_ptr(), len(held), per_packet=per_block)
    if room is not out:
        out.copy_(room)
