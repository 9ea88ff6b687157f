"""The collectives that the oracle test runs: how to make every rank's plan and buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lossycoll.plan import Finish, Missing, Plan, ring, transpose, tree
from lossycoll.plan import data_movement as exchange
from lossycoll.plan.order import draw_order
from lossycoll.plan.wire_types import Array
from tests.support.network import elements


@dataclass(frozen=True)
class Case:
    """One collective at one size. ``sums``: needs a type that can be added."""

    name: str
    plans: Callable[[int, int, int, int], list[Plan]]
    """(world, count, elements per packet, operation number) -> a plan per rank"""
    sums: bool
    in_place: bool
    weighted: bool = False
    """Contributions have weights, and means a divisor of their own."""
    barrier: bool = False
    """Counts ranks, at any size: ones come back as the world. For reliable delivery only."""


def _uneven(world: int, count: int) -> tuple[int, ...]:
    """Chunk sizes that differ, with an empty one among them."""
    return tuple((count * (rank + 1)) // world if rank != 1 else 0 for rank in range(world))


def _all_reduce(
    builder: Callable[..., Plan], missing: Missing, finish: Finish = Finish.MEAN
) -> Callable[..., list[Plan]]:
    def plans(world: int, count: int, epp: int, op: int) -> list[Plan]:
        how = {"order": draw_order(11, 3, op, world), "missing": missing, "finish": finish}
        return [builder(world, rank, count, epp, **how) for rank in range(world)]

    return plans


def _rotating_root(op: int, world: int) -> int:
    return op % world


CASES = (
    Case("ring own", _all_reduce(ring.all_reduce, Missing.OWN), sums=True, in_place=True),
    Case("ring keep", _all_reduce(ring.all_reduce, Missing.KEEP), sums=True, in_place=True),
    Case("transpose own", _all_reduce(transpose.all_reduce, Missing.OWN), sums=True, in_place=True),
    Case(
        "transpose keep", _all_reduce(transpose.all_reduce, Missing.KEEP), sums=True, in_place=True
    ),
    Case(
        "reduce_scatter",
        lambda w, n, epp, op: [transpose.reduce_scatter(w, r, n, epp) for r in range(w)],
        sums=True,
        in_place=False,
    ),
    Case(
        "ring weighted",
        _all_reduce(ring.all_reduce, Missing.ZERO, Finish.WEIGHTED),
        sums=True,
        in_place=True,
        weighted=True,
    ),
    Case(
        "transpose weighted",
        _all_reduce(transpose.all_reduce, Missing.ZERO, Finish.WEIGHTED),
        sums=True,
        in_place=True,
        weighted=True,
    ),
    Case(
        "reduce_scatter weighted",
        lambda w, n, epp, op: [
            transpose.reduce_scatter(w, r, n, epp, finish=Finish.WEIGHTED) for r in range(w)
        ],
        sums=True,
        in_place=False,
        weighted=True,
    ),
    Case(
        "reduce_scatter uneven",
        lambda w, n, epp, op: [
            transpose.reduce_scatter(w, r, _uneven(w, n), epp) for r in range(w)
        ],
        sums=True,
        in_place=False,
    ),
    Case(
        "all_gather",
        lambda w, n, epp, op: [exchange.all_gather(w, r, n, epp) for r in range(w)],
        sums=False,
        in_place=False,
    ),
    Case(
        "all_gather uneven",
        lambda w, n, epp, op: [exchange.all_gather(w, r, _uneven(w, n), epp) for r in range(w)],
        sums=False,
        in_place=False,
    ),
    Case(
        "broadcast",
        lambda w, n, epp, op: [
            tree.broadcast(w, r, n, epp, root=_rotating_root(op, w)) for r in range(w)
        ],
        sums=False,
        in_place=True,
    ),
    Case(
        "all_to_all",
        lambda w, n, epp, op: [exchange.all_to_all(w, r, n, epp) for r in range(w)],
        sums=False,
        in_place=False,
    ),
    Case(
        "gather",
        lambda w, n, epp, op: [
            exchange.gather(w, r, n, epp, root=_rotating_root(op, w)) for r in range(w)
        ],
        sums=False,
        in_place=False,
    ),
    Case(
        "scatter",
        lambda w, n, epp, op: [
            exchange.scatter(w, r, n, epp, root=_rotating_root(op, w)) for r in range(w)
        ],
        sums=False,
        in_place=False,
    ),
    Case(
        "point to point",
        lambda w, n, epp, op: [
            exchange.point_to_point(w, r, n, epp, sender=op % w, receiver=(op + 1) % w)
            for r in range(w)
        ],
        sums=False,
        in_place=False,
    ),
    Case(
        "barrier",
        lambda w, n, epp, op: [tree.barrier(w, r, epp) for r in range(w)],
        sums=True,
        in_place=True,
        barrier=True,
    ),
)


def buffers(
    case: Case, plans: list[Plan], dtype: str, rng: np.random.Generator
) -> tuple[list[Array], list[Array]]:
    """Random inputs, and outputs that hold something else (or the inputs, in place).

    A barrier's are ones, of which the sum counts the ranks.
    """
    if case.barrier:
        ones = [np.ones(plan.in_elements, np.float32) for plan in plans]
        return ones, ones
    inputs = [elements(dtype, plan.in_elements, rng) for plan in plans]
    if case.in_place:
        return inputs, inputs
    return inputs, [elements(dtype, plan.out_elements, rng) for plan in plans]
