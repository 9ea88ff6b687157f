"""Checks of plan builders' arguments. All refusals are ValueErrors with both values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import index
from typing import Final

from .model import MOST_SLOTS, Finish
from .topology import Topology

MAX_WORLD: Final = 32767
"""A slot number is 16 bits on the wire and an all-reduce uses two per rank."""


def check_world(world: int, rank: int, elements_per_packet: int) -> None:
    if not 1 <= world <= MAX_WORLD:
        raise ValueError(f"world is {world}, wanted 1 to {MAX_WORLD}")
    check_rank("rank", rank, world)
    if elements_per_packet < 1:
        raise ValueError(f"elements_per_packet is {elements_per_packet}, wanted 1 or more")


def check_rank(name: str, rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise ValueError(f"{name} is {rank}, wanted 0 to {world - 1}")


def check_count(name: str, count: int) -> int:
    """``count`` as a plain int; refuses what is not an integer or is negative."""
    try:
        value = index(count)
    except TypeError:
        raise ValueError(f"{name} is {count!r}, wanted an integer of 0 or more") from None
    if value < 0:
        raise ValueError(f"{name} is {value}, wanted 0 or more")
    return value


def check_counts(name: str, counts: int | Sequence[int], world: int) -> tuple[int, ...]:
    """One element count per rank: a single number stands for the same on every rank."""
    if not isinstance(counts, Sequence):
        return (check_count(name, counts),) * world
    if len(counts) != world:
        raise ValueError(f"{name} has {len(counts)} entries, wanted one per rank: {world}")
    return tuple(check_count(f"{name}[{i}]", count) for i, count in enumerate(counts))


def check_order(order: tuple[int, ...], world: int) -> None:
    if sorted(order) != list(range(world)):
        raise ValueError(f"order is {order}, wanted each of 0 to {world - 1} once")


def check_owners(owners: tuple[int, ...], world: int) -> None:
    wanted = set(range(world))
    if not owners or len(set(owners)) != len(owners) or not wanted.issuperset(owners):
        raise ValueError(f"order is {owners}, wanted one or more of 0 to {world - 1}, each once")


def check_topology(topology: Topology | None, world: int) -> Topology:
    """``topology``, or the flat one for None; refuses one of another number of ranks."""
    if topology is None:
        return Topology.flat(world)
    if topology.world != world:
        raise ValueError(f"the topology has {topology.world} ranks, wanted {world}")
    return topology


def check_finish(finish: Finish, *allowed: Finish) -> None:
    if finish not in allowed:
        names = " or ".join(f.name for f in allowed)
        raise ValueError(f"finish is {finish!r}, wanted {names}")


def check_slots(numbers: int) -> None:
    if numbers > MOST_SLOTS:
        raise ValueError(f"the plan needs {numbers} slots, wanted {MOST_SLOTS} at most")


def starts(counts: tuple[int, ...]) -> tuple[int, ...]:
    """First element of each of several ranges that lie one after another."""
    return tuple(accumulate(counts[:-1], initial=0)) if counts else ()


def others(world: int, rank: int) -> tuple[int, ...]:
    """The other ranks, from ``rank + 1`` on and around. Every rank begins with another peer, so
    that they don't all send to rank 0 first."""
    return (*range(rank + 1, world), *range(rank))
