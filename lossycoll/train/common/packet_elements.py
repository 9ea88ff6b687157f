"""What became of the elements of a tensor whose packets a method knows one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from lossycoll.runtime.engine.codecs import rounded

from .staleness import Mask


def as_elements(
    lost: Mask, per_block: int, chunk: int, device: torch.device | None = None
) -> Tensor:
    """The mask (world * chunk,) of elements in lost blocks, (world, blocks) by owner.

    A block has ``per_block`` elements, a chunk's last one maybe fewer.
    """
    blocks = torch.from_numpy(lost).to(device=device)
    return blocks.repeat_interleave(per_block, dim=1)[:, :chunk].reshape(-1)


def missed_by_rounding(
    source: Tensor, lost: Mask, sent: Mask, per_block: int, encoding: str
) -> Tensor:
    """The part of a contribution that was lost, or rounded off by its encoding to the nearest.

    ``source`` and result are float32 (world * n,); ``lost`` is bool (world, blocks), by owner;
    ``sent`` is bool (world,), the owners that it was sent to.
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
    """Fills float32 (n,) with what a receiver decodes of ``source``, by packets of ``per_block``.

    The encoding rounds to the nearest; ``out`` may be ``source``.
    """
    held = source.cpu()  # codecs work on host memory; what is there is itself
    room = out if out.is_cpu else held
    rounded(encoding, held.data_ptr(), room.data_ptr(), len(held), per_packet=per_block)
    if room is not out:
        out.copy_(room)
