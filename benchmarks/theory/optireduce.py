"""The error of algorithms that send each packet once: OptiReduce's comparison (NSDI 2025), by
formula and by engines with sockets.

An error is the mean square distance of the ranks' results from the mean of all contributions, each
of N(mean, 1), over the variance 1 / N of that mean. A rank that misses a result has its own data.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from lossycoll.plan import Missing, Plan, hierarchical, ring
from lossycoll.plan.order import draw_order
from tests.support.network import GROUP

from .experiments import IN_FLIGHT, PER_PACKET, Job, executing
from .formulas import others_arrived

RING, SERVER, TRANSPOSE = "ring", "parameter server", "transpose"
ALGORITHMS: Final = (RING, SERVER, TRANSPOSE)
PUBLISHED: Final = {RING: 14.55, SERVER: 9.92, TRANSPOSE: 2.47}
"""For a tensor of 500 M entries; neither the data nor the losses are published."""
WORLD, PACKETS, OPERATIONS = 8, 32, 600
LOSSES: Final = ("loss=0.01", "loss=0.05", "loss=0.1", "loss=0.1,burst=4")


def counted(algorithm: str, p: float, world: int) -> list[tuple[int, float]]:
    """(contributions in a reduced packet, chance); a ring's lost partial sum takes all before."""
    if algorithm != RING:
        return [(1 + k, chance) for k, chance in others_arrived(p, world)]
    ends = [(1 + hops, p * (1 - p) ** hops) for hops in range(world - 1)]
    return [*ends, (world, (1 - p) ** (world - 1))]


def reach(algorithm: str, p: float, world: int) -> float:
    """The chance that a rank gets a reduced packet, the mean over the ranks; one has it anyway."""
    hops = range(world) if algorithm == RING else (0, *[1] * (world - 1))
    return sum((1 - p) ** hop for hop in hops) / world


def by_count(algorithm: str, p: float, world: int) -> float:
    """The error here: an owner divides by what it got."""
    there = reach(algorithm, p, world)
    inverse = sum(chance / count for count, chance in counted(algorithm, p, world))
    return world * (there * (inverse - 1 / world) + (1 - there) * (1 - 1 / world))


def zero_filled(algorithm: str, p: float, world: int, mean: float) -> float:
    """The error as OptiReduce's code has it: what is lost is 0, and the sum is divided by all."""
    there, others = reach(algorithm, p, world), world - 1
    lost = [(world - count, chance) for count, chance in counted(algorithm, p, world)]
    summed = sum(chance * (n + mean**2 * n * n) for n, chance in lost)
    return (there * summed + (1 - there) * (others + (mean * others) ** 2)) / world


def plans(algorithm: str, world: int, op: int) -> list[Plan]:
    """A parameter server is a transpose of one owner, drawn as all owners are."""
    order = draw_order(5, GROUP, op, world)
    build = ring.all_reduce if algorithm == RING else hierarchical.all_reduce
    owners = order[:1] if algorithm == SERVER else order
    return [
        build(
            world, rank, PACKETS * PER_PACKET, PER_PACKET, order=owners, missing=Missing.KEEP
        )
        for rank in range(world)
    ]  # fmt: skip


def measured(executor: str, algorithm: str, faults: str, operations: int) -> tuple[float, float]:
    """The error, and its standard error over operations, whose owners are drawn."""
    rng, found = np.random.default_rng(1), []
    with executing(executor, WORLD, f"{faults},seed=1") as at:
        for begin in range(0, operations, IN_FLIGHT):
            jobs = []
            for op in range(begin, min(operations, begin + IN_FLIGHT)):
                data = rng.standard_normal((WORLD, PACKETS * PER_PACKET)).astype(np.float32)
                made = plans(algorithm, WORLD, op)
                jobs.append(Job(made, list(data), [row.copy() for row in data]))
            at.run(jobs)
            for job in jobs:
                true = np.mean(job.given, axis=0, dtype=np.float64)
                found.append(WORLD * np.square(np.stack(job.got) - true).mean())
    return float(np.mean(found)), float(np.std(found, ddof=1) / np.sqrt(len(found)))


def best_effort(operations: int = OPERATIONS) -> list[dict[str, Any]]:
    """A row for each algorithm and loss."""
    rows = []
    for algorithm in ALGORITHMS:
        for faults in LOSSES:
            p = float(faults.partition(",")[0].partition("=")[2])
            error, deviation = measured("sockets", algorithm, faults, operations)
            rows.append({
                **{"algorithm": algorithm, "faults": faults, "loss": p},
                **{"error": error, "deviation": deviation},
                "predicted": by_count(algorithm, p, WORLD),
                "zero_filled": [zero_filled(algorithm, p, WORLD, m) for m in (0.0, 1.0)],
            })  # fmt: skip
    return rows
