"""Plans of operations: sizes of packets, algorithm, order; ready for C, and kept for the next.

All are functions of what every rank knows: who takes part, sizes and options.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

from lossycoll.options.fields import Options
from lossycoll.plan import (
    Algorithm,
    Finish,
    Topology,
    choose_algorithm,
    default_algorithm,
    draw_order,
    finer_elements,
    leave_out,
    owner_count,
    packet_count,
    rename,
)
from lossycoll.plan.codec import ENCODED, GROUPS, elements_of
from lossycoll.plan.registry import AUTO, HIERARCHICAL
from lossycoll.runtime.engine.binding import DType, EngineCall

from .group_context import Members

REPLANNED: Final = ("all_reduce", "broadcast", "barrier")
"""Buffers of these have no part per rank: without some ranks they are planned for those left."""


Choice = tuple[Algorithm, Topology | None]
"""A plan's algorithm, and by which hosts and sites; None: as if each rank had a host of its own."""


def algorithm(collective: str, members: Members, name: str, topology: Topology) -> Choice:
    """The algorithm of ``collective`` under the option ``name``, and the topology it goes by.

    A plan whose buffers have a part per rank is kept when ranks are lost, without their streams. So
    it must be one in which they passed on nobody else's data.
    """
    replanned = collective in REPLANNED
    by = choose_algorithm(collective, name, len(members.ranks) if replanned else members.world)
    if not (replanned or members.complete or by.direct):
        by = default_algorithm(collective)
    direct = replanned or members.complete or not by.relays
    return by, topology if name == HIERARCHICAL and by.levels and direct else None


def name_of(options: Options, topology: Topology) -> str:
    """The name of the algorithm that the options mean, where ranks share hosts and sites so.

    "auto" goes by tiers where there are any, since what leaves a host is the least that way. Not
    with an estimator that weighs links: a rank then has links to a few others only, and partial
    sums of others come by links that it knows nothing of.
    """
    if options.algorithm != AUTO or topology.is_flat:
        return options.algorithm
    weighs = options.delivery == "lossy" and options.estimator == "inverse_probability"
    return AUTO if weighs and not topology.one_host else HIERARCHICAL


def order(
    choice: Choice, members: Members, options: Options, group: int, op: int, packets: int
) -> tuple[int, ...] | None:
    """The order of the ranks for operation number ``op``, redrawn for each that may lose packets.

    Without loss, as within one host, nobody's own contribution weighs more, and one order does for
    all. Where parity alone meets ``max_missing``, a short buffer, of so many packets, has the first
    ranks of the order alone as owners, if each rank is a host of its own.
    """
    by, topology = choice
    if options.delivery != "lossy" or not by.draws_order:
        return None
    if topology is not None and topology.one_host:
        return None
    drawn = draw_order(options.seed, group, op & 0xFFFFFFFF, len(members.ranks))
    if not (options.by_parity_alone and by.few_owners and topology is None):
        return drawn
    return drawn[: owner_count(len(drawn), packets, options.stream_packets)]


def finish_of_owned(choice: Choice, options: Options) -> Finish:
    """The end of a sum whose owner is always the same. Where nothing can be lost both ways give the
    same, and MEAN adds the owner's part in passing."""
    within_host = choice[1] is not None and choice[1].one_host
    return Finish.MEAN if options.delivery == "reliable" or within_host else Finish.STRATIFIED


def finer(
    by: Algorithm,
    elements: int | tuple[int, ...],
    owners: int,
    per_packet: int,
    options: Options,
) -> int:
    """Elements of a packet of a reduction or of blocks, each rank a host of its own: fewer than
    ``per_packet`` where parity alone meets ``max_missing`` and streams are short.

    ``elements``: of an all-reduce's buffer, which so many ranks own; or of each chunk.
    """
    whole = by.direct or by.few_owners  # what is lost of a stream is one rank's
    if not (whole and options.by_parity_alone):
        return per_packet
    longest = elements if isinstance(elements, int) else max(elements)
    if by.collective == "all_reduce":
        longest = -(-longest // owners)
    packets = packet_count(longest, per_packet)
    return finer_elements(per_packet, packets, options.stream_packets, options.finer_packets)


class ElementLayout(NamedTuple):
    """The elements of a plan."""

    dtype: DType  # Their type
    per_packet: int  # How many of them a packet carries

    def elements(self, nbytes: int | tuple[int, ...]) -> int | tuple[int, ...]:
        """Elements in so many bytes of a buffer, or of each of several."""
        size = self.dtype.itemsize
        return nbytes // size if isinstance(nbytes, int) else tuple([n // size for n in nbytes])


@lru_cache(maxsize=64)
def sum_layout_of(
    layout: ElementLayout, payload: int, encoding: str, topology: Topology
) -> tuple[int, Topology]:
    """Sizes of packets where only what leaves a host is encoded: within one, sums are exact.

    A packet there has room for ``host_packets`` of the network's, whose elements take more bytes
    there. So those of the network have no more elements than fit.

    ``payload``: bytes that a packet of the network has room for.
    """
    if encoding == "same" or not topology.shares_hosts:
        return layout.per_packet, topology
    room = payload * topology.host_packets // layout.dtype.itemsize
    per_packet = min(layout.per_packet, room // GROUPS[0] * GROUPS[0])
    if not per_packet:
        return layout.per_packet, topology
    return per_packet, topology.with_sum_packets(room // per_packet)


@lru_cache(maxsize=64)
def layout_of(payload: int, dtype: DType, encoding: str) -> ElementLayout:
    """The elements of a call's plan. ``payload``: bytes that a packet has room for. ``dtype``: the
    type that the call adds; BYTES for copies, unless they are encoded."""
    if encoding != "same":
        dtype = DType[ENCODED.upper()]
    return ElementLayout(dtype, elements_of(encoding, dtype.name.lower(), payload))


def made(members: Members, by: Algorithm, *sizes: Any, **options: Any) -> EngineCall:
    """This rank's plan, for C.

    Called as ``made(members, algorithm, *sizes, elements_per_packet, **options)``, with the
    arguments of the algorithm's builder (``lossycoll.plan.registry.COLLECTIVES``). ``root`` is a
    rank; ``topology``, for algorithms with levels, is that of all ranks; absent, each is a host of
    its own.
    """
    if by.collective not in REPLANNED:
        plan = by.build(members.world, members.rank, *sizes, **options)
        return EngineCall.of(plan if members.complete else leave_out(plan, members.ranks))
    if "topology" in options:
        options["topology"] = options["topology"].of_members(members.ranks)
    if "root" in options:
        options["root"] = members.ranks.index(options["root"])
    plan = by.build(len(members.ranks), members.ranks.index(members.rank), *sizes, **options)
    return EngineCall.of(plan if members.complete else rename(plan, members.ranks, members.world))


kept: Final = lru_cache(maxsize=512)(made)
"""The same, or the plan that was kept of such a call."""
