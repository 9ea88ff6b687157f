"""Plans: one rank's part in one collective, as plain data.

A plan is a table of slots, which the native engine and the numpy reference execute alike. Nothing
here knows about sockets, torch or time.

A *packet* of a slot is ``elements_per_packet`` consecutive elements of its range (the last one may
be shorter); how many that is, its *level* says. A packet is ready as soon as each of the slot's
sources has arrived or been given up for that very packet, and is then sent on at once. Packets of a
range never wait for one another.

A *stream* is the packets of one slot that come from one peer. It is identified on the wire by (slot
number at the receiver, rank of the sender).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import Final

from .sets import NO_PARITY, Code

MOST_SLOTS: Final = 0xFFFE
"""Slots are numbered below: in 16 bits, of which the engine keeps the last two numbers."""
MAX_LEVELS: Final = 4
"""LC_LEVELS of native/lossycoll.h."""


class Combine(IntEnum):
    """Way in which the contributions to a slot's packet become one value."""

    COPY = 0
    """The value is the (single) source's, or the rank's own."""
    ADD = 1
    """The value is the sum of what arrived, own contribution included if ``own``."""


class Own(IntEnum):
    """Source of a slot's own contribution."""

    NONE = 0
    """There is none."""
    INPUT = 1
    """The rank's own input: it counts one."""
    SLOT = 2
    """The result of another slot of the same rank: it counts as many as went into it."""


class Finish(IntEnum):
    """Last step of a packet's sum, once every source has arrived or been given up."""

    NONE = 0
    """Nothing: a partial sum travels on, with its count."""
    MEAN = 1
    """sum / count * scale, where count is the number of contributions in the sum: its weight."""
    STRATIFIED = 2
    """(own + others * sources / sources that arrived) / full weight * scale.

    Own data is a stratum of its own, for owners that cannot be redrawn: it may be the sum of a
    host, fed by another slot. If none of the others arrived the result is the mean of it, own /
    its weight * scale.
    """
    WEIGHTED = 3
    """sum / divisor * scale, whatever has arrived.

    Each contribution is multiplied by the weight of the link that it came by when it is added, on
    the way as well. With weights of 1 / (delivery rate) this is Horvitz and Thompson's estimator
    (J. Am. Stat. Assoc. 47, 1952); with weights of 1 what is lost counts as zero.
    """


class Target(IntEnum):
    """Place where a slot's value is stored."""

    NONE = 0
    """Nowhere: the slot only sends its own contribution (no sources)."""
    OUT = 1
    """In the output buffer at ``offset``."""
    SCRATCH = 2
    """In memory of the operation's own, at ``offset``: a partial sum to pass on."""


class Missing(IntEnum):
    """Value of a copying slot's packet that never arrives."""

    KEEP = 0
    """The output buffer stays as it was."""
    OWN = 1
    """The output becomes own * scale (own is read from the *output* buffer, in place)."""
    ZERO = 2
    """The output becomes zero."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Delivery of a stream's packets."""

    reliable: bool = False  # They are resent until all have arrived; then the rest says nothing
    repair: int = 0  # Rounds of resending
    code: Code = NO_PARITY  # Of parity; fitted to each stream
    # Where what a path loses decides on parity, there are at most so many packets of it for 64. 0:
    # it doesn't.
    most_parity: int = 0
    choose_rounds: bool = False  # The rounds are chosen by what a path loses; ``repair`` is 0
    # Where something is chosen by what a path loses: which share may be missing. Below 0: a tenth
    # of what is lost.
    max_missing: float = -1.0


@dataclass(frozen=True, slots=True)
class Level:
    """Properties that the streams of some slots share. Both ends of a stream are of one level."""

    elements_per_packet: int  # Elements that one packet carries
    delivery: Delivery | None = None  # None: the call's
    plain: bool = False  # Elements travel as they are, however the call's are encoded


@dataclass(frozen=True, slots=True)
class Edge:
    """One stream, seen from this rank."""

    peer: int  # The rank at the other end
    slot: int  # Number of the slot that it feeds there


@dataclass(frozen=True, slots=True)
class Slot:
    """One step of a plan.

    A slot without sources must have ``own``; with the input, it is ready at once. A packet with no
    contribution at all (every source lost, no own data) is not sent on, nor fed to another slot.

    What another slot feeds (``Own.SLOT``): that one stands before it in the plan and waits for
    something itself. Its packets are larger by a whole factor, or as large, and ``own_offset`` is a
    whole number of packets of this slot. So each packet here lies in one packet there, and has one
    weight. A copy that is fed stores nothing and only sends.
    """

    number: int  # What sources write into their packets; unique within the plan, 16 bits
    offset: int  # First element of the range, in the buffer that ``target`` names
    length: int  # Elements of the range; at least 1
    sources: tuple[int, ...] = ()  # Ranks whose packets it waits for
    dests: tuple[Edge, ...] = ()  # Streams that it feeds
    combine: Combine = Combine.COPY  # How own and received elements become one value
    own: Own = Own.NONE  # Where the rank's own contribution comes from
    # First element of that: in the input buffer, or in the range of the slot that feeds
    own_offset: int = 0
    feed: int = 0  # Number of the slot that feeds, with ``Own.SLOT``
    finish: Finish = Finish.NONE  # What is done to a sum
    target: Target = Target.OUT  # Where the value is stored
    missing: Missing = Missing.KEEP  # What a packet of a copy becomes that never arrives
    level: int = 0  # Which of the plan's levels its packets are of, in and out
    # The weight of a STRATIFIED sum of which nothing is missing; 0: every source and the own
    # contribution count one
    full_weight: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one rank does in one collective."""

    collective: str  # Its name
    algorithm: str  # What the builder is registered as
    rank: int  # Whose part it is
    world: int  # Number of ranks
    # Elements that one packet of level 0 carries. Its delivery is the call's.
    elements_per_packet: int
    in_elements: int  # Elements of the caller's input buffer
    out_elements: int  # Elements of its output buffer. In place, one buffer is both.
    scratch_elements: int  # Elements of memory that slots with ``Target.SCRATCH`` need
    slots: tuple[Slot, ...]  # The steps; those without sources are sent in this order
    # Equal on all ranks that mean the same collective. Peers compare it before data flows.
    signature: int
    levels: tuple[Level, ...] = ()  # Those from level 1 on; all ranks have the same

    @property
    def all_levels(self) -> tuple[Level, ...]:
        """All levels, indexed by the slots' level numbers; MAX_LEVELS at most."""
        return (Level(self.elements_per_packet), *self.levels)


def packet_count(length: int, elements_per_packet: int) -> int:
    return -(-length // elements_per_packet)


SIGNATURE_VERSION: Final = 2
"""Part of every signature: grows when the same arguments come to mean another plan."""


def signature(collective: str, algorithm: str, *fields: int | Iterable[int]) -> int:
    """A 64-bit hash, equal on all ranks, processes, machines and Python versions.

    ``fields``: integers, or sequences of them: all that must agree among ranks, in an order that
    the algorithm fixes. The caller's own rank is never one of them.
    """
    parts = [f"{SIGNATURE_VERSION}/{collective}/{algorithm}"]
    for field in fields:
        # int() since an IntEnum's str() is another in Python 3.10.
        if isinstance(field, int):
            parts.append(str(int(field)))
        else:
            parts.append(",".join([str(int(value)) for value in field]))
    return int.from_bytes(blake2b("/".join(parts).encode(), digest_size=8).digest(), "little")


SLOT: Final = struct.Struct("<QQQIIIHBBBBBBHH")
"""lc_slot_desc of native/lossycoll_plan.h: 48 bytes. An lc_edge is two shorts."""


def encode(plan: Plan) -> tuple[bytes, bytes]:
    """The tables of a plan, little-endian, as all machines that are supported.

    The edges of a slot lie together, its sources (whose slot field is 0) before its dests, and
    slots follow in the plan's order.

    Returns (slot table, edge table): 48 bytes per slot and 4 per edge.
    """
    slots = bytearray()
    edges: list[int] = []
    if len(plan.all_levels) > MAX_LEVELS:
        raise ValueError(f"{len(plan.all_levels)} levels, wanted {MAX_LEVELS} at most")
    highest = max([slot.number for slot in plan.slots], default=0)
    if highest >= MOST_SLOTS:
        raise ValueError(
            f"the {plan.collective} plan doesn't fit the native table: a slot has number "
            f"{highest}, wanted {MOST_SLOTS - 1} at most"
        )
    try:
        for slot in plan.slots:
            slots += SLOT.pack(
                slot.offset,
                slot.length,
                slot.own_offset,
                len(edges) // 2,
                len(slot.sources),
                len(slot.dests),
                slot.number,
                slot.combine,
                slot.own,
                slot.finish,
                slot.target,
                slot.missing,
                slot.level,
                slot.feed,
                slot.full_weight,
            )
            for source in slot.sources:
                edges += (source, 0)
            for dest in slot.dests:
                edges += (dest.peer, dest.slot)
        return bytes(slots), struct.pack(f"<{len(edges)}H", *edges)
    except struct.error as error:
        raise ValueError(
            f"the {plan.collective} plan doesn't fit the native table: {error}"
        ) from None
