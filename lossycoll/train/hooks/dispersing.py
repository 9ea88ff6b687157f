"""A communication hook of DDP that interleaves a bucket's elements over the packets.

A packet carries a few hundred neighbouring elements, most of a matrix's row. If it is lost, all of
them are off together and in one direction, that of a rank's own gradient, which took their place. A
layer adds up along rows, so such errors add up as well, while those of scattered elements cancel
(docs/quality.md has figures). Here one packet carries elements k, k + P, k + 2P, ... of a bucket,
and the packets of neighbours k and k + 1 are sent far apart, for losses that come in bursts.
"""

# Annotations are no text in this file: DDP compares the hook's with its own classes.
from typing import Final

import torch
import torch.distributed as dist

from lossycoll.backend.process_group import LossyProcessGroup
from lossycoll.train.common.collectives import sum_of

from .addends import addend

GOLDEN: Final = 0.6180339887498949
"""(sqrt(5) - 1) / 2."""


def dispersing_hook(
    state: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Averages gradients as DDP does, with each packet's elements scattered over the bucket.

    Register it once::

        ddp.register_comm_hook(None, lossycoll.dispersing_hook)

    No packet carries neighbouring elements, so the errors of a lost one cancel: docs/quality.md has
    figures. The hook costs two copies of each bucket, and its memory once. Over another backend, or
    with reliable delivery, it returns the plain mean.

    Args:
        state: The group to average over; None is the default group.
        bucket: DDP's bucket of dense gradients, in which the mean is formed.

    Returns:
        A future of the bucket's buffer.

    Raises:
        UnsupportedError: The gradients are sparse.
    """
    flat, group = addend(bucket, state, "dispersing_hook")
    if not isinstance(group, LossyProcessGroup) or group.lossy_options().delivery == "reliable":
        return sum_of(dist.all_reduce(flat, group=group, async_op=True))
    packets = _prime_from(len(flat) / (group.block_bytes // flat.element_size()))
    sent = _interleaved(flat, packets)
    done = sum_of(dist.all_reduce(sent, group=group, async_op=True))

    def back(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        whole: torch.Tensor = flat
        return whole.copy_(_restored(future.value(), packets, len(flat)))

    out: torch.futures.Future[torch.Tensor] = done.then(back)
    return out


def _interleaved(flat: torch.Tensor, packets: int) -> torch.Tensor:
    """float (packets * n,): a packet has the elements k, k + packets, ... of ``flat``, with zeros
    behind its end; its place is :func:`_places` of k."""
    rows = -(-len(flat) // packets)
    padded = flat.new_zeros(rows * packets)
    padded[: len(flat)] = flat
    sent = flat.new_empty(packets, rows)
    sent[_places(packets).to(flat.device)] = padded.view(rows, packets).t()
    return sent.view(-1)


def _restored(sent: torch.Tensor, packets: int, length: int) -> torch.Tensor:
    """The ``length`` elements that :func:`_interleaved` was given."""
    at = _places(packets).to(sent.device)
    return sent.view(packets, -1).index_select(0, at).t().reshape(-1)[:length]


def _places(packets: int) -> torch.Tensor:
    """int64 (packets,): where each packet is sent.

    Packets that are d apart are sent the fractional part of 0.618 d of all apart: of all ratios the
    golden one keeps small d farthest apart. ``packets`` is prime, so each place is taken once.
    """
    return torch.arange(packets) * max(1, round(GOLDEN * packets)) % packets


def _prime_from(least: float) -> int:
    """The first prime from ``least`` on. Distances in matrices have small factors, and a packet
    would carry a whole column if its step had them as well."""
    number = max(2, int(least + 1))
    while any(number % factor == 0 for factor in range(2, int(number**0.5) + 1)):
        number += 1
    return number
