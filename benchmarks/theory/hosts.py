"""What lost partial sums do to the variance of means, by the reference executor."""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from lossycoll.plan import Finish, Topology, default_algorithm, draw_order
from lossycoll.plan.faults import Inject
from tests.oracle.codec import Array
from tests.oracle.masks import lost
from tests.oracle.reference_executor import execute

GROUP: Final = 3
PACKETS: Final = 40
"""Of a chunk; each is an observation."""
SHAPES: Final = {"8 x 1": (1,) * 8, "4 x 2": (2,) * 4, "2 x 4": (4, 4), "4, 2, 1, 1": (4, 2, 1, 1)}
"""Ranks of each host."""


def variance(
    ranks: tuple[int, ...],
    loss: float,
    operations: int,
    *,
    algorithm: str = "all_reduce",
    mean: float = 0.0,
) -> float:
    """Mean square distance from ``mean`` of what owners reduce from N(mean, 1), over that of the
    lossless mean.
    """
    topology = Topology.of_labels(
        [i for i, n in enumerate(ranks) for _ in range(n)], [0] * sum(ranks)
    )
    build = default_algorithm(algorithm).build
    world, rng, total, samples = topology.world, np.random.default_rng(9), 0.0, 0
    count = PACKETS * (world if algorithm == "all_reduce" else 1)
    for op in range(operations):
        more = {"order": draw_order(17, GROUP, op, world)} if algorithm == "all_reduce" else {}
        plans = [build(world, r, count, 1, topology=topology, **more) for r in range(world)]
        given: list[Array] = [rng.normal(mean, 1, plan.in_elements) for plan in plans]
        got = [np.zeros(plan.out_elements) for plan in plans]
        faults = partial(lost, Inject(loss=loss, seed=5), GROUP, op)
        found = execute(plans, given, got, "f64", 1.0, faults, 0)
        for plan, result, output in zip(plans, found, got, strict=True):
            for slot in plan.slots:
                if slot.finish == Finish.NONE:
                    continue
                values = output[slot.offset : slot.offset + slot.length]
                if slot.finish == Finish.STRATIFIED:
                    own = ranks[topology.hosts[plan.rank]]
                    values = values[result.counts[slot.number] > own]
                total += float(((values - mean) ** 2).sum())
                samples += len(values)
    return total / samples * world
