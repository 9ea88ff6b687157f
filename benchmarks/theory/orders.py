"""What the order of a bucket's elements changes: as they are, dispersed, or rotated.

A lost packet leaves a rank its own data there, and rows of a matrix have something in common. So
each rank's row is N(0, 1) for all its elements, plus N(0, 1) for each. An error is the mean square
distance from the mean of all ranks, over elements, and over the sums of rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from lossycoll.plan import Missing, hierarchical
from lossycoll.plan.order import draw_order
from lossycoll.train import hooks
from tests.support.network import GROUP

from .experiments import IN_FLIGHT, PER_PACKET, Job, executing
from .optireduce import TRANSPOSE, WORLD, by_count

ROWS: Final = 64
"""Of a bucket; each is a packet, if elements are sent as they are."""
LENGTH = ROWS * PER_PACKET
OPERATIONS: Final = 400
LOSSES: Final = ("loss=0.1", "loss=0.1,burst=8", "loss=0.4", "loss=0.4,burst=8")
TIMED: Final = 1 << 20
"""Elements of the bucket that the transforms are timed on, packets of 352."""
ROUNDS: Final = 9


@lru_cache(maxsize=4)
def signs(length: int) -> Tensor:
    """+1 or -1 for each element, the same at all ranks."""
    draw = torch.Generator().manual_seed(7)
    return torch.randint(0, 2, (length,), generator=draw, dtype=torch.float32) * 2 - 1


def butterflies(rows: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform over the first dimension, a power of two."""
    n = len(rows)
    out = rows.reshape(n, -1)
    half = 1
    while half < n:
        pairs = out.view(n // (2 * half), 2, half, -1)
        out = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).view(n, -1)
        half *= 2
    return out / math.sqrt(n)


def height(length: int, per_packet: int) -> int:
    """Packets that a transform spans: a power of two, no fewer than there are."""
    return 1 << max(0, math.ceil(math.log2(length / per_packet)))


def rotated(flat: Tensor, per_packet: int) -> Tensor:
    """The randomized Hadamard transform: each packet has a part of every element."""
    rows = height(len(flat), per_packet)
    padded = flat.new_zeros(-(-len(flat) // rows) * rows)
    padded[: len(flat)] = flat * signs(len(flat))
    return butterflies(padded.view(rows, -1)).view(-1)


def rotated_back(sent: Tensor, length: int, per_packet: int) -> Tensor:
    """What :func:`rotated` was given."""
    return butterflies(sent.view(height(length, per_packet), -1)).view(-1)[:length] * signs(length)


def dispersed(flat: Tensor, per_packet: int) -> Tensor:
    """As dispersing_hook sends it."""
    return hooks._interleaved(flat, hooks._prime_from(len(flat) / per_packet))


def dispersed_back(sent: Tensor, length: int, per_packet: int) -> Tensor:
    return hooks._restored(sent, hooks._prime_from(length / per_packet), length)


Order = tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor, int, int], Tensor]]
ORDERS: Final[dict[str, Order]] = {
    "as they are": (lambda flat, _: flat.clone(), lambda sent, length, _: sent[:length]),
    "dispersed": (dispersed, dispersed_back),
    "rotated": (rotated, rotated_back),
}


def errors(executor: str, order: str, faults: str, operations: int) -> dict[str, float]:
    """Of elements and of rows' sums, each with its standard error over operations, and the
    deviation between operations of the first. Relative to the variance of one element of a mean."""
    there, back = ORDERS[order]
    draw = torch.Generator().manual_seed(1)
    found: list[tuple[float, float]] = []
    with executing(executor, WORLD, f"{faults},seed=1") as at:
        for begin in range(0, operations, IN_FLIGHT):
            jobs, truths = [], []
            for op in range(begin, min(operations, begin + IN_FLIGHT)):
                common = torch.randn(WORLD, ROWS, 1, generator=draw)
                each = torch.randn(WORLD, ROWS, PER_PACKET, generator=draw)
                data = (common + each).view(WORLD, -1)
                truths.append(data.double().mean(0))
                sent = [there(row, PER_PACKET).numpy() for row in data]
                owners = draw_order(5, GROUP, op, WORLD)
                plans = [
                    hierarchical.all_reduce(
                        *(WORLD, rank, len(sent[0]), PER_PACKET),
                        order=owners,
                        missing=Missing.KEEP,
                    )
                    for rank in range(WORLD)
                ]
                jobs.append(Job(plans, sent, [row.copy() for row in sent]))
            at.run(jobs)
            for job, truth in zip(jobs, truths, strict=True):
                got = [back(torch.from_numpy(one), LENGTH, PER_PACKET) for one in job.got]
                off = (torch.stack(got).double() - truth).view(WORLD, ROWS, PER_PACKET)
                scale = WORLD / 2  # an element's variance is 2
                sums = off.sum(2).square().mean() / PER_PACKET
                found.append((float(scale * off.square().mean()), float(scale * sums)))
    means, spread = np.mean(found, 0), np.std(found, 0, ddof=1)
    root = math.sqrt(len(found))
    return {
        **{"element": float(means[0]), "element_error": float(spread[0] / root)},
        **{"row": float(means[1]), "row_error": float(spread[1] / root)},
        "spread": float(spread[0]),
    }


def milliseconds(order: str) -> float:
    """CPU time of the way there and back, of 1 MB, the median."""
    there, back = ORDERS[order]
    flat, found = torch.randn(TIMED), []
    for _ in range(ROUNDS):
        begin = time.process_time()
        back(there(flat, 352), TIMED, 352)
        found.append(time.process_time() - begin)
    return 1e3 * float(np.median(found)) / (4 * TIMED / 1e6)


def orders(operations: int = OPERATIONS) -> list[dict[str, Any]]:
    """A row for each order and loss."""
    rows = []
    for order in ORDERS:
        spent = milliseconds(order)
        for faults in LOSSES:
            p = float(faults.partition(",")[0].partition("=")[2])
            rows.append({
                **{"order": order, "faults": faults, "ms_per_mb": spent},
                "predicted": by_count(TRANSPOSE, p, WORLD),
                **errors("sockets", order, faults, operations),
            })  # fmt: skip
    return rows
