"""Which plan an operation uses, ready for C, and kept for the sizes that come again.

All are functions of what every rank knows: who takes part, sizes and options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

from lossycoll.options.fields import Options
from lossycoll.plan import (
    Algorithm,
    Finish,
    Missing,
    Plan,
    choose_algorithm,
    default_algorithm,
    draw_order,
    leave_out,
    rename,
)
from lossycoll.runtime.engine.binding import Encoded

from .sequencer import Roster

REPLANNED: Final = ("all_reduce", "broadcast", "barrier")
"""Buffers of these have no part per rank: without some ranks they are planned for those left."""


def algorithm(collective: str, who: Roster, name: str) -> Algorithm:
    """What does ``collective`` under the option ``name``.

    A plan whose buffers have a part per rank is kept when ranks are lost, without their streams. So
    it must be one in which they passed on nobody else's data.
    """
    if collective in REPLANNED:
        return choose_algorithm(collective, name, len(who.members))
    found = choose_algorithm(collective, name, who.world)
    return found if who.complete or found.direct else default_algorithm(collective)


def order(
    by: Algorithm, who: Roster, options: Options, group: int, op: int
) -> tuple[int, ...] | None:
    """The order of the ranks for operation number ``op``, redrawn for each that may lose packets.

    Without loss nobody's own contribution weighs more, and one order does for all.
    """
    if options.delivery != "lossy" or not by.draws_order:
        return None
    return draw_order(options.seed, group, op & 0xFFFFFFFF, len(who.members))


def _renamed(who: Roster, build: Callable[[int, int], Plan]) -> Encoded:
    """A plan for as many ranks as are left."""
    plan = build(len(who.members), who.members.index(who.rank))
    return Encoded.of(plan if who.complete else rename(plan, who.members, who.world))


def _left(who: Roster, plan: Plan) -> Encoded:
    """A plan whose buffers have a part per rank: those of lost ranks stay empty."""
    return Encoded.of(plan if who.complete else leave_out(plan, who.members))


@lru_cache(maxsize=256)
def all_reduce(
    who: Roster,
    by: Algorithm,
    elements: int,
    per_packet: int,
    order: tuple[int, ...] | None,
    missing: Missing,
    finish: Finish,
) -> Encoded:
    """``order`` is a permutation of as many ranks as are left, or None."""
    return _renamed(
        who,
        lambda world, rank: by.build(
            world, rank, elements, per_packet, order=order, missing=missing, finish=finish
        ),
    )


@lru_cache(maxsize=64)
def broadcast(
    who: Roster, by: Algorithm, nbytes: int, per_packet: int, root: int, fanout: int
) -> Encoded:
    place = who.members.index(root)
    return _renamed(
        who,
        lambda world, rank: by.build(world, rank, nbytes, per_packet, root=place, fanout=fanout),
    )


@lru_cache(maxsize=16)
def barrier(who: Roster, by: Algorithm, fanout: int) -> Encoded:
    return _renamed(who, lambda world, rank: by.build(world, rank, 1, fanout=fanout))


@lru_cache(maxsize=64)
def reduce_scatter(
    who: Roster, by: Algorithm, elements: int | tuple[int, ...], per_packet: int, finish: Finish
) -> Encoded:
    return _left(who, by.build(who.world, who.rank, elements, per_packet, finish=finish))


@lru_cache(maxsize=64)
def all_gather(
    who: Roster, by: Algorithm, nbytes: int | tuple[int, ...], per_packet: int
) -> Encoded:
    return _left(who, by.build(who.world, who.rank, nbytes, per_packet))


@lru_cache(maxsize=64)
def all_to_all(who: Roster, by: Algorithm, nbytes: int, per_packet: int) -> Encoded:
    return _left(who, by.build(who.world, who.rank, nbytes, per_packet))


def all_to_all_uneven(
    who: Roster, by: Algorithm, send: Sequence[int], receive: Sequence[int], per_packet: int
) -> Encoded:
    return _left(who, by.build(who.world, who.rank, send, receive, per_packet))


@lru_cache(maxsize=64)
def gather(who: Roster, by: Algorithm, nbytes: int, per_packet: int, root: int) -> Encoded:
    return _left(who, by.build(who.world, who.rank, nbytes, per_packet, root=root))


@lru_cache(maxsize=64)
def scatter(who: Roster, by: Algorithm, nbytes: int, per_packet: int, root: int) -> Encoded:
    return _left(who, by.build(who.world, who.rank, nbytes, per_packet, root=root))
