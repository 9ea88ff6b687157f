"""An all-reduce whose owners have as much of the buffer as their links can carry.

Source: the "butterfly" all-reduce of Ryabinin et al., "Moshpit SGD", NeurIPS 2021, whose peers of
unlike links own unlike parts. There parts come of a linear program; with what each rank sends here
there is a closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from .assembly import add, assemble, copy_own, receive, send_own
from .model import Edge, Finish, Missing, Plan, Slot, packet_count, signature
from .validation import check_counts, check_world, others, starts


def fractions(rates: Sequence[int]) -> tuple[Fraction, ...]:
    """The exact part of a buffer that each rank owns such that the last of them ends soonest.

    Of a buffer of 1, the owner of ``f`` among N ranks sends (1 - f) in contributions and (N - 1) f
    in means: 1 + (N - 2) f, which takes (1 + (N - 2) f) / rate. It gets as much if all contribute.
    Ranks that own something end at the same time, and the others, whose links are too slow for
    that, own nothing. With two ranks the parts make no difference: they are equal. A rate of 0 owns
    nothing; not all are 0.
    """
    if min(rates, default=0) < 0 or not any(rates):
        raise ValueError(f"rates are {tuple(rates)}, wanted 0 or more, and one above 0")
    world, most = len(rates), sum(rate > 0 for rate in rates)
    if world == 2:
        return tuple(Fraction(int(rate > 0), most) for rate in rates)
    if world == 1:
        return (Fraction(1),)
    fastest = sorted(rates, reverse=True)
    count, total = 1, fastest[0]
    # All end at (world - 2 + count) / total. A rank that would end later by itself owns nothing.
    while count < most and (world - 2 + count) * fastest[count] > total:
        total += fastest[count]
        count += 1
    ends = Fraction(world - 2 + count, total)
    return tuple(max(Fraction(0), (ends * rate - 1) / (world - 2)) for rate in rates)


def owned(elements: int, elements_per_packet: int, rates: Sequence[int]) -> tuple[int, ...]:
    """Elements that each rank owns, in order: whole packets, but for the buffer's last."""
    packets = packet_count(elements, elements_per_packet)
    wanted = [packets * part for part in fractions(rates)]
    whole = [int(part) for part in wanted]
    by_rest = sorted(range(len(wanted)), key=lambda rank: (whole[rank] - wanted[rank], rank))
    for rank in by_rest[: packets - sum(whole)]:
        whole[rank] += 1
    ends = [min(elements, elements_per_packet * end) for end in accumulate(whole, initial=0)]
    return tuple(end - begin for begin, end in pairwise(ends))


def all_reduce(
    world: int,
    rank: int,
    lengths: Sequence[int],
    gives: Sequence[bool],
    elements_per_packet: int,
) -> Plan:
    """Mean of the buffers of those that give, by their weights, on all ranks and in place.

    Slots are numbered as those of :func:`.hierarchical.all_reduce`, and nothing travels that can't
    count. Ranks that don't give own nothing; ``lengths`` are of whole packets but the last.
    """
    check_world(world, rank, elements_per_packet)
    sizes = check_counts("lengths", lengths, world)
    begin, elements = starts(sizes), sum(sizes)
    peers = others(world, rank)
    slots = [send_own(s, begin[s], sizes[s], Edge(s, s)) for s in peers if gives[rank]]
    back = [Edge(peer, world + rank) for peer in peers]
    givers = tuple(peer for peer in peers if gives[peer])
    mine = (rank, begin[rank], begin[rank], sizes[rank])
    if givers:
        slots.append(add(*mine, *back, sources=givers, finish=Finish.WEIGHTED))
    else:
        slots.append(copy_own(*mine, *back))
    slots += [receive(world + s, s, begin[s], sizes[s], missing=Missing.OWN) for s in peers]
    given = [int(one) for one in gives]
    buffers = (elements, elements)
    return _plan("all_reduce", world, rank, elements_per_packet, buffers, slots, sizes, given)


def collect(
    world: int,
    rank: int,
    lengths: Sequence[int],
    gives: Sequence[bool],
    elements_per_packet: int,
) -> Plan:
    """All contributions to the part that this rank owns, one after another by rank, none added.
    Arguments are as of :func:`all_reduce`. Slot ``s`` gets what rank ``s`` sends."""
    check_world(world, rank, elements_per_packet)
    sizes = check_counts("lengths", lengths, world)
    begin, own, peers = starts(sizes), sizes[rank], others(world, rank)
    slots = [send_own(world + s, begin[s], sizes[s], Edge(s, rank)) for s in peers if gives[rank]]
    # A rank without a part has a step, too: it is in the operation.
    slots.append(copy_own(rank, rank * own, begin[rank] if own else 0, max(1, own)))
    slots += [receive(s, s, s * own, own) for s in peers if gives[s]]
    given = [int(one) for one in gives]
    buffers = (sum(sizes), max(1, world * own))
    return _plan("all_to_all", world, rank, elements_per_packet, buffers, slots, sizes, given)


def spread(world: int, rank: int, lengths: Sequence[int], elements_per_packet: int) -> Plan:
    """Plan that spreads what each rank owns to all ranks, in place. Arguments are as of
    :func:`all_reduce`. Slot ``world + s`` gets what rank ``s`` owns."""
    check_world(world, rank, elements_per_packet)
    sizes = check_counts("lengths", lengths, world)
    begin, elements, peers = starts(sizes), sum(sizes), others(world, rank)
    back = [Edge(peer, world + rank) for peer in peers]
    slots = [copy_own(rank, begin[rank], begin[rank], sizes[rank], *back)]
    slots += [receive(world + s, s, begin[s], sizes[s]) for s in peers]
    buffers = (elements, elements)
    return _plan("all_gather", world, rank, elements_per_packet, buffers, slots, sizes)


def _plan(
    collective: str,
    world: int,
    rank: int,
    elements_per_packet: int,
    buffers: tuple[int, int],
    slots: Sequence[Slot],
    *agreed: Sequence[int],
) -> Plan:
    """A plan of owners; ``agreed``: what all ranks must have alike, beside world and packets."""
    return assemble(
        collective,
        "owners",
        world,
        rank,
        elements_per_packet,
        sizes=buffers,
        slots=slots,
        sign=signature(collective, "owners", world, *agreed, elements_per_packet),
    )
