"""RPS' mixing constants (Yu et al., ICML 2019), by formula and by the engine's own functions."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from benchmarks.studies.large.exchange import Exchange
from lossycoll.plan.faults import Inject

CASES: Final = ((4, 0.1), (8, 0.1), (8, 0.3), (16, 0.1))
"""Ranks and loss."""
CALLS: Final = 40
PACKETS: Final = 16
"""Of each rank's part, in a call."""


def mixing(p: float, world: int) -> tuple[float, float]:
    """(a1, a2) of E[W W^T] = a1 I + (1 - a1) A and E[W A W^T] = a2 I + (1 - a2) A, A being 1 / N.

    Column j of W says which ranks' values rank j has in the end: the mean of what the owner got, or
    its own. e is E[1/R], R the owner's contributions, of mean m and mean square m2.
    """
    q = 1 - p
    e = (1 - p**world) / (world * q)
    m = 1 + (world - 1) * q
    m2 = (world - 1) * p * q + m * m
    a1 = (e * m + (world - 1) * p - 1) / (world - 1)
    cross = 2 * (1 - e) * (world * m - m2) / (world - 1)
    return a1, ((m2 * e + cross + world - m) / world - 1) / (world - 1)


def mixed(p: float, world: int, calls: int) -> dict[str, float]:
    """The same by the engine's losses, owners and sums; each packet carries all of W's columns.

    Standard errors are over calls, whose owners are drawn.
    """
    exchange = Exchange(world, Inject(loss=p, seed=3), 4 * world, order_seed=5)
    packets, found = world * PACKETS, []
    for _ in range(calls):
        buffers = [torch.eye(world)[rank].repeat(packets) for rank in range(world)]
        exchange.all_reduce(buffers)
        w = torch.stack(buffers).view(world, packets, world).permute(1, 2, 0).double()
        d1 = w.square().sum((1, 2)) / world
        d2 = w.sum(2).square().sum(1) / world**2
        found.append([float((world * d - 1).mean() / (world - 1)) for d in (d1, d2)])
    assert exchange.traffic.missing > 0
    mean, error = np.mean(found, 0), np.std(found, 0) / np.sqrt(calls)
    return {
        **{"a1": float(mean[0]), "a1_error": float(error[0])},
        **{"a2": float(mean[1]), "a2_error": float(error[1])},
    }


def rps(calls: int = CALLS) -> list[dict[str, Any]]:
    """A row for each number of ranks and loss."""
    rows = []
    for world, p in CASES:
        a1, a2 = mixing(p, world)
        predicted = {"a1_predicted": a1, "a2_predicted": a2}
        rows.append({"world": world, "loss": p, **mixed(p, world, calls), **predicted})
    return rows
