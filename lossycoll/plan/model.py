"""What a plan is: one rank's part in one collective, as plain data.

A plan is a table of slots. A slot names a range of elements, where that range's
addends come from, how they are combined, what is done to the result and who is
sent it. Nothing here knows about sockets, torch or time; two executors take the
same table (the native engine and the numpy reference; a simulator is planned).

A *packet* of a slot is ``elements_per_packet`` consecutive elements of its range
(the last one may be shorter). A packet is ready as soon as each of the slot's
sources has settled for that very packet, and is then sent on at once; so packets
of a range never wait for one another.

A *stream* is the packets of one slot that come from one peer. It is identified
on the wire by (slot number at the receiver, rank of the sender).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Combine(IntEnum):
    """How the contributions to a slot's packet become one value."""

    COPY = 0
    """The value is the (single) source's, or the rank's own."""
    ADD = 1
    """The value is the sum of what arrived, own contribution included if ``own``."""


class Finish(IntEnum):
    """What is done to a packet's sum once every source has settled."""

    NONE = 0
    """Nothing: a partial sum travels on, with its count."""
    MEAN = 1
    """sum / count * scale, where count is the number of contributions in the sum."""
    STRATIFIED = 2
    """(own + (others / their count) * (world - 1)) / world * scale.

    Own data is a stratum of its own, for owners that cannot be redrawn. If none
    of the others arrived the result is own * scale.
    """
    WEIGHTED = 3
    """sum / divisor * scale, whatever has arrived.

    Each contribution is multiplied by the weight of the link that it came by when it is added, on
    the way as well. With weights of 1 / (delivery rate) this is Horvitz and Thompson's estimator
    (J. Am. Stat. Assoc. 47, 1952); with weights of 1 what is lost counts as zero.
    """


class Target(IntEnum):
    """Where a slot's value is stored."""

    NONE = 0
    """Nowhere: the slot only sends the rank's own input (no sources)."""
    OUT = 1
    """In the output buffer at ``offset``."""
    SCRATCH = 2
    """In memory of the operation's own, at ``offset``: a partial sum to pass on."""


class Missing(IntEnum):
    """What a packet of a copying slot becomes when it never arrives."""

    KEEP = 0
    """The output buffer stays as it was."""
    OWN = 1
    """The output becomes own * scale (own is read from the *output* buffer, in place)."""
    ZERO = 2
    """The output becomes zero."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One stream, seen from this rank: the other end and the slot it feeds there."""

    peer: int
    slot: int


@dataclass(frozen=True, slots=True)
class Slot:
    """One step of a plan.

    ``offset``, ``length``, ``own_offset`` are in elements: of the buffer that
    ``target`` names, and of the input buffer. ``number`` is the stream number that
    sources write into their packets; it is unique within the plan. ``sources`` are
    ranks; ``dests`` are the streams this slot feeds. A slot without sources is
    ready at once and must have ``own``. A packet with no contribution at all
    (every source lost, own out) is not sent on.
    """

    number: int
    offset: int
    length: int
    sources: tuple[int, ...] = ()
    dests: tuple[Edge, ...] = ()
    combine: Combine = Combine.COPY
    own: bool = False
    own_offset: int = 0
    finish: Finish = Finish.NONE
    target: Target = Target.OUT
    missing: Missing = Missing.KEEP


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything one rank does in one collective.

    ``in_elements`` and ``out_elements`` are the sizes of the caller's two buffers
    (an in-place collective passes one buffer as both); ``scratch_elements`` is the
    memory that slots with ``Target.SCRATCH`` need. ``signature`` is equal on all
    ranks that mean the same collective: peers compare it before data flows.
    """

    collective: str
    algorithm: str
    rank: int
    world: int
    elements_per_packet: int
    in_elements: int
    out_elements: int
    scratch_elements: int
    slots: tuple[Slot, ...]
    signature: int


def packet_count(length: int, elements_per_packet: int) -> int:
    """Number of packets that carry ``length`` elements."""
    return -(-length // elements_per_packet)
