"""How far lossy all-reduces are from the true mean: ring against transpose, in the reference.

    python -m benchmarks.micro.estimator

Each rank holds noise of variance 1, so the lossless mean of N ranks has variance 1/N. Printed is
the mean squared distance of the result from the lossless mean, in units of that variance: over all
ranks ("all": what a rank trains with, own data where a mean did not arrive), and over the values
that were reduced ("reduced").
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np

from benchmarks.common.tables import Table, add_report
from lossycoll.plan import hierarchical, ring
from lossycoll.plan.faults import Inject
from lossycoll.plan.order import draw_order
from tests.oracle import reference_executor
from tests.oracle.masks import lost

TABLE = Table(
    "performance.md",
    "estimator",
    "ranks | loss | burst | ring, all | transpose, all | ring, reduced | transpose, reduced",
)
PACKETS = 240
PER_PACKET = 16
OPERATIONS = 12


def errors(algorithm: str, world: int, loss: float, burst: float) -> tuple[float, float]:
    """(over all elements of all ranks, over those whose mean arrived), in units of 1/world."""
    builder = {"ring": ring, "transpose": hierarchical}[algorithm].all_reduce
    count = PACKETS * PER_PACKET
    faults = Inject(loss=loss, burst=burst, seed=17)
    rng = np.random.default_rng(3)
    square, reduced_square, reduced = 0.0, 0.0, 0
    for op in range(OPERATIONS):
        data = [rng.standard_normal(count) for _ in range(world)]
        mean = np.mean(data, axis=0)
        order = draw_order(1, 0, op, world)
        plans = [builder(world, rank, count, PER_PACKET, order=order) for rank in range(world)]
        results = [x.copy() for x in data]
        gone = partial(lost, faults, 0, op)
        reference_executor.execute(plans, data, results, "f64", 1.0, gone, 0)
        for own, got in zip(data, results, strict=True):
            off = (got - mean) ** 2
            arrived = got != own
            square += float(off.sum())
            reduced_square += float(off[arrived].sum())
            reduced += int(arrived.sum())
    total = OPERATIONS * world * count
    return square / total * world, reduced_square / max(reduced, 1) * world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_report(parser, TABLE.page)
    options = parser.parse_args()
    rows = []
    for world in (2, 4, 8):
        for loss, burst in ((0.01, 1.0), (0.1, 1.0), (0.1, 8.0), (0.3, 1.0)):
            ring_, transpose = (errors(name, world, loss, burst) for name in ("ring", "transpose"))
            every = [f"{one[of]:.3f}" for of in (0, 1) for one in (ring_, transpose)]
            rows.append([f"{world}", f"{loss:g}", f"{burst:g}", *every])
    print(TABLE.report(options.report, rows))


if __name__ == "__main__":
    main()
