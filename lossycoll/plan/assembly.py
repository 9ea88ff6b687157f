"""Parts of plans: kinds of slots, plans made of them, and plans for the ranks that are left.

All offsets and lengths are in elements. Slots of length 0 may be among them. ``assemble`` leaves
them out, since peers would wait for the end of a stream that carries nothing.

After a rank has died, collectives whose buffers have no part per rank (all-reduce, broadcast,
barrier) are planned for as many ranks as are left and renamed: ``rename``. Those whose buffers
have one keep their plan without the streams of lost ranks: ``leave_out``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .model import Combine, Edge, Finish, Level, Missing, Own, Plan, Slot, Target, signature


def send_own(number: int, own_offset: int, length: int, *dests: Edge, level: int = 0) -> Slot:
    """The rank's own input goes to ``dests`` and is stored nowhere."""
    return Slot(
        number=number,
        offset=0,
        length=length,
        dests=dests,
        own=Own.INPUT,
        own_offset=own_offset,
        target=Target.NONE,
        level=level,
    )


def copy_own(
    number: int, offset: int, own_offset: int, length: int, *dests: Edge, level: int = 0
) -> Slot:
    """The rank's own input goes to its own output, and to ``dests``."""
    return Slot(
        number=number,
        offset=offset,
        length=length,
        dests=dests,
        own=Own.INPUT,
        own_offset=own_offset,
        level=level,
    )


def receive(
    number: int,
    sender: int,
    offset: int,
    length: int,
    *dests: Edge,
    missing: Missing = Missing.KEEP,
    level: int = 0,
) -> Slot:
    """Data of ``sender`` goes to the output, and on to ``dests``."""
    return Slot(
        number=number,
        offset=offset,
        length=length,
        sources=(sender,),
        dests=dests,
        missing=missing,
        level=level,
    )


def add(
    number: int,
    offset: int,
    own_offset: int,
    length: int,
    *dests: Edge,
    sources: tuple[int, ...],
    finish: Finish = Finish.NONE,
    target: Target = Target.OUT,
) -> Slot:
    """The rank's own input and what ``sources`` send are added up, and go to ``dests``."""
    return Slot(
        number=number,
        offset=offset,
        length=length,
        sources=sources,
        dests=dests,
        combine=Combine.ADD,
        own=Own.INPUT,
        own_offset=own_offset,
        finish=finish,
        target=target,
    )


def send_fed(number: int, feed: int, length: int, *dests: Edge, level: int) -> Slot:
    """The result of slot ``feed``, from its beginning on, goes to ``dests``."""
    return Slot(
        number=number,
        offset=0,
        length=length,
        dests=dests,
        own=Own.SLOT,
        feed=feed,
        target=Target.NONE,
        level=level,
    )


def assemble(
    collective: str,
    algorithm: str,
    world: int,
    rank: int,
    elements_per_packet: int,
    *,
    sizes: tuple[int, int],
    slots: Sequence[Slot],
    sign: int,
    scratch_elements: int = 0,
    levels: tuple[Level, ...] = (),
) -> Plan:
    """The plan of ``slots``, without those of length 0. ``sizes``: elements of the input and of the
    output. ``sign``: the plan's signature. ``levels``: those from level 1 on."""
    return Plan(
        collective=collective,
        algorithm=algorithm,
        rank=rank,
        world=world,
        elements_per_packet=elements_per_packet,
        in_elements=sizes[0],
        out_elements=sizes[1],
        scratch_elements=scratch_elements,
        slots=tuple([slot for slot in slots if slot.length]),
        signature=sign,
        levels=levels,
    )


def rename(plan: Plan, members: Sequence[int], world: int) -> Plan:
    """``plan``, made for ``len(members)`` ranks, with rank ``i``'s part done by ``members[i]``."""
    _check(members, world)
    if plan.world != len(members):
        raise ValueError(f"the plan is for {plan.world} ranks, wanted {len(members)}: {members}")
    slots = [
        replace(
            slot,
            sources=tuple(members[source] for source in slot.sources),
            dests=tuple(Edge(members[dest.peer], dest.slot) for dest in slot.dests),
        )
        for slot in plan.slots
    ]
    return replace(
        plan,
        rank=members[plan.rank],
        world=world,
        slots=tuple(slots),
        signature=_signature(plan, members),
    )


def leave_out(plan: Plan, members: Sequence[int]) -> Plan:
    """``plan`` without the streams from and to ranks that are not among ``members``.

    A range that only such a rank could have filled is left as it was; a sum is that of the
    contributions that are left. The plan must be direct: no rank passes on another one's data.
    """
    _check(members, plan.world)
    if plan.rank not in members:
        raise ValueError(f"rank {plan.rank} is not among {members}, wanted it there")
    left, slots = frozenset(members), []
    for slot in plan.slots:
        sources = tuple(source for source in slot.sources if source in left)
        adds = slot.combine == Combine.ADD and slot.own == Own.INPUT
        if sources or not slot.sources or adds:  # nobody can supply a copy whose source is gone
            dests = tuple(dest for dest in slot.dests if dest.peer in left)
            slots.append(replace(slot, sources=sources, dests=dests))
    return replace(plan, slots=tuple(slots), signature=_signature(plan, members))


def _signature(plan: Plan, members: Sequence[int]) -> int:
    return signature(plan.collective, f"{plan.algorithm} among", plan.signature, members)


def _check(members: Sequence[int], world: int) -> None:
    ordered = list(members) == sorted(set(members))
    if not members or not ordered or not 0 <= members[0] <= members[-1] < world:
        raise ValueError(f"members are {members}, wanted distinct ranks of {world}, ascending")
