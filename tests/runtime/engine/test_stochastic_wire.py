"""Gradients in few bits: rounded at random, the mean of many all-reduces is the true mean, within
four standard errors for every element, with packets lost besides.

The criterion has power: rounded to the nearest, the same all-reduces fail it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from lossycoll.plan import Finish, hierarchical
from lossycoll.plan.codec import named
from lossycoll.plan.order import draw_order
from tests.oracle.codec import Array, codec_of
from tests.support.network import GROUP, Network

WORLD = 3
COUNT = 384
PAYLOAD = 160
OPERATIONS = 1200
IN_FLIGHT = 50
STANDARD_ERRORS = 4.0


def gradients() -> list[Array]:
    """By rank. Of elements of one size, so that few are the ends of their groups."""
    rng = np.random.default_rng(31)
    return [(rng.standard_normal(COUNT) + rank).astype(np.float32) for rank in range(WORLD)]


def standard_errors(encoding: str, loss: float, finish: Finish) -> Array:
    """How far the mean over all operations and ranks is from the truth, by element."""
    per_packet, given = codec_of(encoding, "f32").elements(PAYLOAD), gradients()
    truth = np.mean([x.astype(np.float64) for x in given], axis=0)
    found = np.zeros((OPERATIONS, COUNT))
    weights = np.full((WORLD, WORLD), 1 / (1 - loss))
    how = {"weights": weights, "divisor": float(WORLD)} if finish is Finish.WEIGHTED else {}
    with Network(WORLD, PAYLOAD, inject=f"loss={loss},seed=9") as network:
        for first in range(0, OPERATIONS, IN_FLIGHT):
            jobs = []
            for op in range(first, first + IN_FLIGHT):
                order = draw_order(23, GROUP, op, WORLD)
                plan = partial(hierarchical.all_reduce, WORLD, order=order, finish=finish)
                buffers = [x.copy() for x in given]
                tickets = [
                    network.submit(
                        rank, plan(rank, COUNT, per_packet), (x, x), "f32", encoding=encoding, **how
                    )  # type: ignore[arg-type]
                    for rank, x in enumerate(buffers)
                ]
                jobs.append((op, buffers, tickets))
            for op, buffers, tickets in jobs:
                for rank, ticket in enumerate(tickets):
                    assert network.end(rank, ticket).code == 0
                found[op] = np.mean(buffers, axis=0)
        stats = [engine.stats() for engine in network.engines]
    assert sum(s.packets_missing for s in stats) > 0.8 * loss * sum(s.packets_sent for s in stats)
    error = found.std(axis=0, ddof=1) / np.sqrt(OPERATIONS)
    off: Array = np.abs(found.mean(axis=0) - truth) / error
    return off


@pytest.mark.parametrize("finish", [Finish.MEAN, Finish.WEIGHTED])
@pytest.mark.parametrize("loss", [0.1, 0.3])
@pytest.mark.parametrize("wire", [("int8", 128), ("int4", 32), ("int2", 32)])
def test_the_mean_is_the_truth(wire: tuple[str, int], loss: float, finish: Finish) -> None:
    off = standard_errors(named(*wire, rounding="stochastic"), loss, finish)
    assert off.max() < STANDARD_ERRORS


def test_rounded_to_the_nearest_it_is_not() -> None:
    off = standard_errors(named("int2", 32), 0.1, Finish.MEAN)
    assert off.max() > 10 * STANDARD_ERRORS
