"""Gradients in an order in which no packet carries neighbours: a communication hook of DDP.

A packet carries a few hundred neighbouring elements, much of a matrix's row. Where it is lost, all
of them are off together and in one direction: that a rank's own gradient took their place. A layer
adds up along rows, so such errors add up as well, where those of scattered elements cancel
(docs/quality.md has figures). Here packet k carries elements k, k + P, k + 2P, ... of a bucket.
"""

# Annotations are no text in this file: DDP compares the hook's with its own classes.
from typing import Any

import torch
import torch.distributed as dist

from lossycoll.backend.process_group import LossyProcessGroup
from lossycoll.train.common.arguments import check_dense


def dispersing_hook(
    state: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """DDP's mean of gradients, what is lost of it spread over the whole bucket.

    ``DistributedDataParallel.register_comm_hook(state, lossycoll.dispersing_hook)``; ``state`` is
    the group to average over, None the default one. Over another backend, or in reliable delivery,
    it is the plain mean. Costs two copies of each bucket and its memory once.

    Raises UnsupportedError for sparse gradients.
    """
    flat = bucket.buffer()
    check_dense(flat, "dispersing_hook")
    group = dist.group.WORLD if state is None else state
    flat.div_(dist.get_world_size(group))
    if not isinstance(group, LossyProcessGroup) or group.lossy_options().delivery == "reliable":
        return _first(dist.all_reduce(flat, group=group, async_op=True))
    packets = _prime_from(len(flat) / (group.block_bytes // flat.element_size()))
    sent = _dispersed(flat, packets)
    done = _first(dist.all_reduce(sent, group=group, async_op=True))

    def back(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        whole: torch.Tensor = flat
        return whole.copy_(_restored(future.value(), packets, len(flat)))

    out: torch.futures.Future[torch.Tensor] = done.then(back)
    return out


def _dispersed(flat: torch.Tensor, packets: int) -> torch.Tensor:
    """float[packets * n], n of them from each of as many rows of ``flat``; zeros at the ends."""
    rows = -(-len(flat) // packets)
    padded = flat.new_zeros(rows * packets)
    padded[: len(flat)] = flat
    return padded.view(rows, packets).t().contiguous().view(-1)


def _restored(sent: torch.Tensor, packets: int, length: int) -> torch.Tensor:
    """What :func:`_dispersed` was given."""
    return sent.view(packets, -1).t().reshape(-1)[:length]


def _prime_from(least: float) -> int:
    """The first prime from ``least`` on. Distances in matrices have small factors, and a packet
    would carry a whole column if its step had them as well."""
    number = max(2, int(least + 1))
    while any(number % factor == 0 for factor in range(2, int(number**0.5) + 1)):
        number += 1
    return number


def _first(work: Any) -> torch.futures.Future[torch.Tensor]:
    out: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda f: f.value()[0])
    return out
