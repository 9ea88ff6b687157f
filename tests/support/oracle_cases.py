"""What the oracle test runs: every registered algorithm, and how to make its plans and buffers.

``CASES`` are those of the package, where each rank has a host of its own: test_hierarchical.py,
beside the oracle's test, runs them by many topologies. ``cases_of`` makes them for any algorithm, a
plug-in's as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lossycoll.plan import Algorithm, Finish, Missing, Plan, algorithms
from lossycoll.plan.order import draw_order
from tests.oracle.codec import Array
from tests.support.network import elements
from tests.support.plan_cases import Arguments

PAYLOAD = 256
"""Bytes per packet: few, so that small tensors have many packets."""
IN_PLACE = ("all_reduce", "broadcast", "barrier")
SUMS = ("all_reduce", "reduce_scatter", "barrier")


@dataclass(frozen=True)
class Way:
    """One way to call a collective."""

    label: str
    arguments: Callable[[int, int, int, int], Arguments]
    """(world, rank, count, operation number)"""
    weighted: bool = False
    """Contributions have weights, and means a divisor of their own."""
    millions: bool = False
    """Is run with millions of elements, too."""


@dataclass(frozen=True)
class Case:
    """A way to call a collective, done by one algorithm."""

    algorithm: Algorithm
    way: Way

    @property
    def name(self) -> str:
        label = f", {self.way.label}" if self.way.label else ""
        return f"{self.algorithm.collective} by {self.algorithm.name}{label}"

    @property
    def sums(self) -> bool:
        """Needs a type that can be added."""
        return self.algorithm.collective in SUMS

    @property
    def in_place(self) -> bool:
        return self.algorithm.collective in IN_PLACE

    @property
    def barrier(self) -> bool:
        """Counts ranks, at any size: ones come back as the world. For reliable delivery only."""
        return self.algorithm.collective == "barrier"

    def plans(self, world: int, count: int, elements_per_packet: int, op: int) -> list[Plan]:
        """A plan for each rank, of operation number ``op``."""
        out = []
        for rank in range(world):
            sizes, options = self.way.arguments(world, rank, count, op)
            if not self.algorithm.draws_order and "order" in options:
                options["order"] = None
            out.append(self.algorithm.build(world, rank, *sizes, elements_per_packet, **options))
        return out


def _uneven(world: int, count: int) -> tuple[int, ...]:
    """Chunk sizes that differ, with an empty one among them."""
    return tuple((count * (rank + 1)) // world if rank != 1 else 0 for rank in range(world))


def _split(world: int, count: int, sender: int, receiver: int) -> int:
    """Elements from one rank to another in the uneven exchange; none to the next one."""
    return 0 if receiver == (sender + 1) % world else count * (receiver + 1) // (sender + 1)


def _all_reduce(missing: Missing, finish: Finish = Finish.MEAN) -> Callable[..., Arguments]:
    def arguments(world: int, rank: int, count: int, op: int) -> Arguments:
        del rank
        order = draw_order(11, 3, op, world)
        return (count,), {"order": order, "missing": missing, "finish": finish}

    return arguments


def _chunks(sizes: Callable[[int, int], Any], **options: Any) -> Callable[..., Arguments]:
    return lambda world, rank, count, op: ((sizes(world, count),), options)


def _one(world: int, count: int) -> int:
    """One number for all chunks."""
    del world
    return count


def _rooted(**options: Any) -> Callable[..., Arguments]:
    """The root goes around from operation to operation."""
    return lambda world, rank, count, op: ((count,), {"root": op % world, **options})


def _exchange(world: int, rank: int, count: int, op: int) -> Arguments:
    del op
    send = [_split(world, count, rank, j) for j in range(world)]
    return (send, [_split(world, count, i, rank) for i in range(world)]), {}


WAYS = {
    "all_reduce": [
        Way("own", _all_reduce(Missing.OWN), millions=True),
        Way("keep", _all_reduce(Missing.KEEP), millions=True),
        Way("weighted", _all_reduce(Missing.ZERO, Finish.WEIGHTED), weighted=True),
    ],
    "reduce_scatter": [
        Way("", _chunks(_one, finish=Finish.STRATIFIED), millions=True),
        Way("weighted", _chunks(_one, finish=Finish.WEIGHTED), weighted=True),
        Way("uneven", _chunks(_uneven, finish=Finish.STRATIFIED)),
    ],
    "all_gather": [Way("", _chunks(_one), millions=True), Way("uneven", _chunks(_uneven))],
    "broadcast": [Way("", _rooted(fanout=2), millions=True)],
    "all_to_all": [Way("", _chunks(_one), millions=True)],
    "all_to_all_uneven": [Way("", _exchange)],
    "gather": [Way("", _rooted())],
    "scatter": [Way("", _rooted())],
    "barrier": [Way("", lambda world, rank, count, op: ((), {"fanout": 2}))],
}


def cases_of(algorithm: Algorithm) -> list[Case]:
    """All ways to call the algorithm."""
    return [Case(algorithm, way) for way in WAYS[algorithm.collective]]


CASES = [case for one in algorithms() for case in cases_of(one)]


def lossy_cases(world: int) -> tuple[Case, ...]:
    """Those that may lose packets, of algorithms that serve the world."""
    return tuple(c for c in CASES if not c.barrier and c.algorithm.serves(world))


def sizes(world: int, per_packet: int) -> tuple[int, ...]:
    """Element counts around every boundary of ranks and packets."""
    return (
        0,
        1,
        world - 1,
        world + 1,
        per_packet - 1,
        per_packet,
        per_packet + 1,
        world * per_packet + 3,
        37 * per_packet + 5,
    )


def buffers(
    case: Case,
    plans: list[Plan],
    dtype: str,
    rng: np.random.Generator,
    draw: Callable[[str, int, np.random.Generator], Array] = elements,
) -> tuple[list[Array], list[Array]]:
    """Random inputs, and outputs that hold something else (or the inputs, in place).

    A barrier's are ones, of which the sum counts the ranks. ``draw``: (dtype, count, rng) ->
    elements.
    """
    if case.barrier:
        ones = [np.ones(plan.in_elements, np.float32) for plan in plans]
        return ones, ones
    inputs = [draw(dtype, plan.in_elements, rng) for plan in plans]
    if case.in_place:
        return inputs, inputs
    return inputs, [draw(dtype, plan.out_elements, rng) for plan in plans]
