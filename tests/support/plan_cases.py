"""Every collective with what it should give, for the tests of plans and of their executors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from lossycoll.plan import Finish, Plan, draw_order, ring, transpose, tree
from lossycoll.plan import data_movement as exchange

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Case:
    """One way to call a builder. ``expected`` takes all inputs to all outputs, without loss."""

    name: str
    build: Callable[[int, int, int, int], Plan]  # world, rank, count, elements per packet
    expected: Callable[[Sequence[np.ndarray]], Arrays]  # for scale = world
    in_place: bool = False
    least_world: int = 1
    adds: bool = False

    def plans(self, world: int, count: int, elements_per_packet: int) -> list[Plan]:
        return [self.build(world, rank, count, elements_per_packet) for rank in range(world)]


def uneven(world: int, count: int) -> tuple[int, ...]:
    """Counts of which some are 0 and no two neighbours are equal (for count > 0)."""
    return tuple((count * (rank % 3) + rank % 2) // 2 for rank in range(world))


def split(world: int, count: int, sender: int, receiver: int) -> int:
    """Elements from one rank to another in the uneven all-to-all."""
    return (count * ((2 * sender + receiver) % 4)) // 3


def _sum(inputs: Sequence[np.ndarray]) -> Arrays:
    total = np.sum(inputs, axis=0, dtype=inputs[0].dtype)
    return [total for _ in inputs]


def _cut(array: np.ndarray, sizes: Sequence[int]) -> Arrays:
    return np.split(array, np.cumsum(sizes)[:-1])


def _reduce_scatter(sizes: Callable[[int, int], Sequence[int]]) -> Callable[..., Arrays]:
    def expected(inputs: Sequence[np.ndarray]) -> Arrays:
        world = len(inputs)
        # The total determines the count: both size rules grow with it.
        count = next(c for c in range(100000) if sum(sizes(world, c)) == len(inputs[0]))
        return _cut(np.sum(inputs, axis=0, dtype=inputs[0].dtype), sizes(world, count))

    return expected


def _even(world: int, count: int) -> tuple[int, ...]:
    return (count,) * world


def _gathered(inputs: Sequence[np.ndarray]) -> Arrays:
    return [np.concatenate(inputs)] * len(inputs)


def _swapped(inputs: Sequence[np.ndarray]) -> Arrays:
    world = len(inputs)
    chunks = [np.split(array, world) for array in inputs]
    return [np.concatenate([chunks[i][j] for i in range(world)]) for j in range(world)]


def _swapped_uneven(inputs: Sequence[np.ndarray]) -> Arrays:
    world = len(inputs)
    total = sum(len(array) for array in inputs)
    counts = (
        c
        for c in range(100000)
        if sum(split(world, c, i, j) for i in range(world) for j in range(world)) == total
    )
    count = next(counts)
    chunks = [
        _cut(array, [split(world, count, i, j) for j in range(world)])
        for i, array in enumerate(inputs)
    ]
    return [np.concatenate([chunks[i][j] for i in range(world)]) for j in range(world)]


def _build_uneven(world: int, rank: int, count: int, elements_per_packet: int) -> Plan:
    return exchange.all_to_all_uneven(
        world,
        rank,
        [split(world, count, rank, j) for j in range(world)],
        [split(world, count, i, rank) for i in range(world)],
        elements_per_packet,
    )


def _only(root: int) -> Callable[[Sequence[np.ndarray]], Arrays]:
    def expected(inputs: Sequence[np.ndarray]) -> Arrays:
        everything = np.concatenate(inputs)
        return [
            everything if r == root % len(inputs) else everything[:0] for r in range(len(inputs))
        ]

    return expected


def _scattered(root: int, sizes: Callable[[int, int], Sequence[int]]) -> Callable[..., Arrays]:
    def expected(inputs: Sequence[np.ndarray]) -> Arrays:
        world = len(inputs)
        array = inputs[root % world]
        count = next(c for c in range(100000) if sum(sizes(world, c)) == len(array))
        return _cut(array, sizes(world, count))

    return expected


def _barrier(inputs: Sequence[np.ndarray]) -> Arrays:
    return _sum(inputs)


CASES = [
    Case(
        "transpose",
        lambda w, r, c, e: transpose.all_reduce(w, r, c, e, order=draw_order(5, 1, 2, w)),
        _sum,
        in_place=True,
        adds=True,
    ),
    Case(
        "transpose, ranks in order",
        transpose.all_reduce,
        _sum,
        in_place=True,
        adds=True,
    ),
    Case(
        "ring",
        lambda w, r, c, e: ring.all_reduce(w, r, c, e, order=draw_order(6, 1, 2, w)),
        _sum,
        in_place=True,
        adds=True,
    ),
    Case("ring, ranks in order", ring.all_reduce, _sum, in_place=True, adds=True),
    Case("reduce_scatter", transpose.reduce_scatter, _reduce_scatter(_even), adds=True),
    Case(
        "reduce_scatter, mean",
        lambda w, r, c, e: transpose.reduce_scatter(w, r, c, e, finish=Finish.MEAN),
        _reduce_scatter(_even),
        adds=True,
    ),
    Case(
        "reduce_scatter, uneven",
        lambda w, r, c, e: transpose.reduce_scatter(w, r, uneven(w, c), e),
        _reduce_scatter(uneven),
        adds=True,
    ),
    Case("all_gather", exchange.all_gather, _gathered),
    Case(
        "all_gather, uneven",
        lambda w, r, c, e: exchange.all_gather(w, r, uneven(w, c), e),
        _gathered,
    ),
    Case("all_to_all", exchange.all_to_all, _swapped),
    Case("all_to_all, uneven", _build_uneven, _swapped_uneven),
    Case("gather to 0", exchange.gather, _only(0)),
    Case(
        "gather to the last, uneven",
        lambda w, r, c, e: exchange.gather(w, r, uneven(w, c), e, root=w - 1),
        _only(-1),
    ),
    Case("scatter from 0", exchange.scatter, _scattered(0, _even)),
    Case(
        "scatter from the last, uneven",
        lambda w, r, c, e: exchange.scatter(w, r, uneven(w, c), e, root=w - 1),
        _scattered(-1, uneven),
    ),
    Case(
        "point_to_point",
        lambda w, r, c, e: exchange.point_to_point(w, r, c, e, sender=w - 1, receiver=0),
        lambda inputs: [inputs[-1]] + [inputs[-1][:0]] * (len(inputs) - 1),
        least_world=2,
    ),
    Case(
        "broadcast from 0",
        tree.broadcast,
        lambda inputs: [inputs[0]] * len(inputs),
        in_place=True,
    ),
    Case(
        "broadcast from the last",
        lambda w, r, c, e: tree.broadcast(w, r, c, e, root=w - 1),
        lambda inputs: [inputs[-1]] * len(inputs),
        in_place=True,
    ),
    Case(
        "barrier",
        lambda w, r, c, e: tree.barrier(w, r, e),
        _barrier,
        in_place=True,
        adds=True,
    ),
]

ELEMENTS_PER_PACKET = 7


def counts(world: int, elements_per_packet: int = ELEMENTS_PER_PACKET) -> list[int]:
    """Element counts at which something changes."""
    e = elements_per_packet
    return sorted({0, 1, world - 1, world, e - 1, e, e + 1, world * e, world * e + 1, 3001})
