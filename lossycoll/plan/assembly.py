"""What builders put plans together from: the kinds of slots, and the plan of a list of them.

All offsets and lengths are in elements. Slots of length 0 may be among them. ``assemble`` leaves
them out, since peers would wait for the end of a stream that carries nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from .model import Combine, Edge, Finish, Level, Missing, Own, Plan, Slot, Target


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
    """What ``sender`` sends goes to the output, and on to ``dests``."""
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
    """The plan of ``slots``, without those of length 0.

    ``sizes``: elements of the input and of the output. ``sign``: the plan's signature. ``levels``:
    those from level 1 on.
    """
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
