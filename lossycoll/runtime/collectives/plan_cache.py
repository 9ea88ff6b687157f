"""Which plan an operation uses, ready for C, and kept for the sizes that come again.

All are functions of what every rank knows: who takes part, sizes and options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

from lossycoll.plan import Finish, Missing, Plan, leave_out, rename, ring, transpose, tree
from lossycoll.plan import data_movement as exchange
from lossycoll.runtime.engine.binding import Encoded

from .sequencer import Roster

AUTO_ALGORITHM: Final = "transpose"
"""What algorithm="auto" means, at every world and size: two steps rather than 2 (world - 1), and a
lost packet costs one contribution rather than a partial sum (docs/design.md)."""

_Build = Callable[[int, int], Plan]


def _renamed(who: Roster, build: _Build) -> Encoded:
    """A plan for as many ranks as are left."""
    plan = build(len(who.members), who.members.index(who.rank))
    return Encoded.of(plan if who.complete else rename(plan, who.members, who.world))


def _left(who: Roster, plan: Plan) -> Encoded:
    """A plan whose buffers have a part per rank: those of the dead stay empty."""
    return Encoded.of(plan if who.complete else leave_out(plan, who.members))


@lru_cache(maxsize=256)
def all_reduce(
    who: Roster,
    algorithm: str,
    elements: int,
    per_packet: int,
    order: tuple[int, ...] | None,
    missing: Missing,
    finish: Finish,
) -> Encoded:
    """``order`` is a permutation of as many ranks as are left, or None."""
    name = AUTO_ALGORITHM if algorithm == "auto" else algorithm
    # A ring of one has nothing to do, but the mean over the last rank is still to be scaled.
    in_ring = name == "ring" and len(who.members) > 1
    build: Callable[..., Plan] = ring.all_reduce if in_ring else transpose.all_reduce
    return _renamed(
        who,
        lambda world, rank: build(
            world, rank, elements, per_packet, order=order, missing=missing, finish=finish
        ),
    )


@lru_cache(maxsize=64)
def broadcast(who: Roster, nbytes: int, per_packet: int, root: int, fanout: int) -> Encoded:
    place = who.members.index(root)
    return _renamed(
        who,
        lambda world, rank: tree.broadcast(
            world, rank, nbytes, per_packet, root=place, fanout=fanout
        ),
    )


@lru_cache(maxsize=16)
def barrier(who: Roster, fanout: int) -> Encoded:
    return _renamed(who, lambda world, rank: tree.barrier(world, rank, fanout=fanout))


@lru_cache(maxsize=64)
def reduce_scatter(
    who: Roster, elements: int | tuple[int, ...], per_packet: int, finish: Finish
) -> Encoded:
    plan = transpose.reduce_scatter(who.world, who.rank, elements, per_packet, finish=finish)
    return _left(who, plan)


@lru_cache(maxsize=64)
def all_gather(who: Roster, nbytes: int | tuple[int, ...], per_packet: int) -> Encoded:
    return _left(who, exchange.all_gather(who.world, who.rank, nbytes, per_packet))


@lru_cache(maxsize=64)
def all_to_all(who: Roster, nbytes: int, per_packet: int) -> Encoded:
    return _left(who, exchange.all_to_all(who.world, who.rank, nbytes, per_packet))


def all_to_all_uneven(
    who: Roster, send: Sequence[int], receive: Sequence[int], per_packet: int
) -> Encoded:
    return _left(who, exchange.all_to_all_uneven(who.world, who.rank, send, receive, per_packet))


@lru_cache(maxsize=64)
def gather(who: Roster, nbytes: int, per_packet: int, root: int) -> Encoded:
    return _left(who, exchange.gather(who.world, who.rank, nbytes, per_packet, root=root))


@lru_cache(maxsize=64)
def scatter(who: Roster, nbytes: int, per_packet: int, root: int) -> Encoded:
    return _left(who, exchange.scatter(who.world, who.rank, nbytes, per_packet, root=root))
