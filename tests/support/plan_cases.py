"""Every registered algorithm with what it should give, for the tests of plans and their executors.

``CASES`` are those of the package. ``cases_of`` makes them for any algorithm, a plug-in's as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lossycoll.plan import Algorithm, Finish, Missing, Plan, Topology, algorithms, draw_order

Arrays = list[np.ndarray]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""(sizes, options): what a builder takes between rank and elements per packet, and after it."""


@dataclass(frozen=True)
class Way:
    """One way to call a collective. ``expected`` takes all inputs to all outputs, without loss."""

    label: str
    arguments: Callable[[int, int, int], Arguments]
    """(world, rank, count)"""
    expected: Callable[[Sequence[np.ndarray]], Arrays]
    """For scale = world."""
    in_place: bool = False
    adds: bool = False
    draws_order: bool = False


HOSTS = {2: "aa", 3: "aab", 4: "aabb", 5: "aabab", 6: "abcabc", 7: "aabbbcd", 8: "aabbccdd"}
SITES = {2: "xx", 3: "xxx", 4: "xxxx", 5: "xxxxx", 6: "xyyxyy", 7: "xxxxxyy", 8: "xxxxyyyy"}
"""By world: one host, hosts of one size and of several, and the same with sites."""


def topology(world: int) -> Topology:
    """One for each world, of many kinds; with odd numbers of ranks, packets within a host are
    larger."""
    packets = 1 + 2 * (world % 2)
    return Topology.of_labels(HOSTS.get(world, "a"), SITES.get(world, "x"), packets)


@dataclass(frozen=True)
class Case:
    """A way to call a collective, done by one algorithm."""

    algorithm: Algorithm
    way: Way
    tiers: bool = False
    """Whether ranks share hosts and sites."""

    @property
    def name(self) -> str:
        label = f", {self.way.label}" if self.way.label else ""
        tiers = ", tiers" if self.tiers else ""
        return f"{self.algorithm.collective} by {self.algorithm.name}{label}{tiers}"

    @property
    def worlds(self) -> list[int]:
        """1 to 8, as far as the algorithm serves them."""
        return [world for world in range(1, 9) if self.algorithm.serves(world)]

    def plan(
        self, world: int, rank: int, count: int, elements_per_packet: int, **changed: Any
    ) -> Plan:
        """One rank's plan. ``changed``: options that are to be others."""
        sizes, options = self.way.arguments(world, rank, count)
        known = {"topology": topology(world)} if self.tiers else {}
        options = {**options, **known, **changed}
        return self.algorithm.build(world, rank, *sizes, elements_per_packet, **options)

    def plans(self, world: int, count: int, elements_per_packet: int) -> list[Plan]:
        """A plan for each rank."""
        return [self.plan(world, rank, count, elements_per_packet) for rank in range(world)]


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


def _all_reduce(order: Callable[[int], tuple[int, ...] | None]) -> Callable[..., Arguments]:
    def arguments(world: int, rank: int, count: int) -> Arguments:
        del rank
        how = {"order": order(world), "missing": Missing.OWN, "finish": Finish.MEAN}
        return (count,), how

    return arguments


def _chunks(sizes: Callable[[int, int], Any], **options: Any) -> Callable[..., Arguments]:
    return lambda world, rank, count: ((sizes(world, count),), options)


def _one(world: int, count: int) -> int:
    """One number for all chunks."""
    del world
    return count


def _from_root(of_last: bool, sizes: Callable[[int, int], Any], **options: Any) -> Any:
    return lambda world, rank, count: (
        (sizes(world, count),),
        {"root": world - 1 if of_last else 0, **options},
    )


def _uneven_exchange(world: int, rank: int, count: int) -> Arguments:
    send = [split(world, count, rank, j) for j in range(world)]
    return (send, [split(world, count, i, rank) for i in range(world)]), {}


WAYS = {
    "all_reduce": [
        Way(
            "order drawn",
            _all_reduce(lambda world: draw_order(5, 1, 2, world)),
            _sum,
            in_place=True,
            adds=True,
            draws_order=True,
        ),
        Way("ranks in order", _all_reduce(lambda world: None), _sum, in_place=True, adds=True),
    ],
    "reduce_scatter": [
        Way("", _chunks(_one, finish=Finish.STRATIFIED), _reduce_scatter(_even), adds=True),
        Way("mean", _chunks(_one, finish=Finish.MEAN), _reduce_scatter(_even), adds=True),
        Way(
            "uneven", _chunks(uneven, finish=Finish.STRATIFIED), _reduce_scatter(uneven), adds=True
        ),
    ],
    "all_gather": [Way("", _chunks(_one), _gathered), Way("uneven", _chunks(uneven), _gathered)],
    "all_to_all": [Way("", _chunks(_one), _swapped)],
    "all_to_all_uneven": [Way("", _uneven_exchange, _swapped_uneven)],
    "gather": [
        Way("to 0", _from_root(False, _one), _only(0)),
        Way("to the last, uneven", _from_root(True, uneven), _only(-1)),
    ],
    "scatter": [
        Way("from 0", _from_root(False, _one), _scattered(0, _even)),
        Way("from the last, uneven", _from_root(True, uneven), _scattered(-1, uneven)),
    ],
    "broadcast": [
        Way(
            "from 0",
            _from_root(False, _one, fanout=2),
            lambda inputs: [inputs[0]] * len(inputs),
            in_place=True,
        ),
        Way(
            "from the last",
            _from_root(True, _one, fanout=2),
            lambda inputs: [inputs[-1]] * len(inputs),
            in_place=True,
        ),
    ],
    "barrier": [
        Way("", lambda world, rank, count: ((), {"fanout": 4}), _sum, in_place=True, adds=True)
    ],
}


def cases_of(algorithm: Algorithm) -> list[Case]:
    """All ways to call the algorithm."""
    ways = WAYS[algorithm.collective]
    mine = [way for way in ways if algorithm.draws_order or not way.draws_order]
    if algorithm.levels:
        return [Case(algorithm, way, tiers) for tiers in (False, True) for way in mine]
    return [Case(algorithm, way) for way in mine]


CASES = [case for algorithm in algorithms() for case in cases_of(algorithm)]

ELEMENTS_PER_PACKET = 7


def counts(world: int, elements_per_packet: int = ELEMENTS_PER_PACKET) -> list[int]:
    """Element counts at which something changes."""
    e = elements_per_packet
    return sorted({0, 1, world - 1, world, e - 1, e, e + 1, world * e, world * e + 1, 3001})
