"""Parts of plans: kinds of slots, plans made of them, and plans for the ranks that are left.

All offsets and lengths are in elements. Slots of length 0 may be among them. ``assemble`` leaves
them out, since peers would wait for the end of a stream that carries nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .model import Combine, Edge, Finish, Level, Missing, Own, Plan, Slot, Target, signature


def from_input(offset: int) -> dict[str, Any]:
    """Fields of a slot whose own contribution is the rank's input, from ``offset`` on."""
    return {"own": Own.INPUT, "own_offset": offset}


def from_slot(feed: int, offset: int = 0) -> dict[str, Any]:
    """Fields of a slot whose own contribution is the result of slot ``feed``."""
    return {"own": Own.SLOT, "own_offset": offset, "feed": feed}


def send_own(number: int, own_offset: int, length: int, *dests: Edge, level: int = 0) -> Slot:
    """The rank's own input goes to ``dests`` and is stored nowhere."""
    own, none = Own.INPUT, Target.NONE
    return Slot(
        number, 0, length, (), dests, Combine.COPY, own, own_offset, target=none, level=level
    )


def copy_own(
    number: int, offset: int, own_offset: int, length: int, *dests: Edge, level: int = 0
) -> Slot:
    """The rank's own input goes to its own output, and to ``dests``."""
    return Slot(number, offset, length, dests=dests, level=level, **from_input(own_offset))


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
    return Slot(number, offset, length, (sender,), dests, missing=missing, level=level)


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
    how: dict[str, Any] = {"combine": Combine.ADD, "finish": finish, "target": target}
    return Slot(number, offset, length, sources, dests, **how, **from_input(own_offset))


def send_fed(number: int, feed: int, length: int, *dests: Edge, level: int) -> Slot:
    """The result of slot ``feed``, from its beginning on, goes to ``dests``."""
    own = from_slot(feed)
    return Slot(number, 0, length, dests=dests, target=Target.NONE, level=level, **own)


class Sums:
    """Slots by which one rank adds up or sends on, tier by tier. ``own`` is what
    :func:`from_input` or :func:`from_slot` returns."""

    def __init__(self) -> None:
        self.sent: list[Slot] = []
        """Slots that wait for nothing."""
        self.waiting: list[Slot] = []
        self._scratch = 0

    def send(self, number: int, length: int, to: int, level: int, own: dict[str, Any]) -> None:
        dests, slots = (Edge(to, number),), self.waiting if "feed" in own else self.sent
        slots.append(Slot(number, 0, length, dests=dests, target=Target.NONE, level=level, **own))

    def add(
        self,
        number: int,
        length: int,
        sources: Sequence[int],
        level: int,
        own: dict[str, Any],
        **how: Any,
    ) -> None:
        """``how``: of a sum that is stored in the output, at ``offset``; others go to scratch
        memory."""
        if not how:
            how = {"offset": self._scratch, "target": Target.SCRATCH}
            self._scratch += length
        fed: dict[str, Any] = {"sources": tuple(sources), "combine": Combine.ADD, "level": level}
        self.waiting.append(Slot(number, length=length, **fed, **own, **how))


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
    levels: tuple[Level, ...] = (),
) -> Plan:
    """The plan of ``slots``, without those of length 0. ``sizes``: elements of the input and of the
    output. ``sign``: the plan's signature. ``levels``: those from level 1 on."""
    kept = tuple([slot for slot in slots if slot.length])
    scratch = [slot.offset + slot.length for slot in kept if slot.target is Target.SCRATCH]
    return Plan(
        collective=collective,
        algorithm=algorithm,
        rank=rank,
        world=world,
        elements_per_packet=elements_per_packet,
        in_elements=sizes[0],
        out_elements=sizes[1],
        scratch_elements=max(scratch, default=0),
        slots=kept,
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
