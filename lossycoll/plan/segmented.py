"""What all-reduces have in common that cut their buffer into one segment per rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .assembly import assemble
from .model import Finish, Missing, Plan, Slot
from .order import segments
from .signature import signature
from .validation import check_count, check_finish, check_order, check_world


class Segment(NamedTuple):
    """Elements ``offset`` to ``offset + length`` of the buffer; ``number``: 0 to world - 1."""

    number: int
    offset: int
    length: int


class SegmentedAllReduce(NamedTuple):
    """An all-reduce's arguments, checked; segment ``s`` belongs to rank ``order[s]``."""

    world: int
    rank: int
    elements: int
    elements_per_packet: int
    order: tuple[int, ...]
    missing: Missing
    finish: Finish
    positions: tuple[int, ...]
    """By rank: its place in ``order``, which is the number of its segment."""
    segments: tuple[Segment, ...]

    def plan(self, algorithm: str, slots: Sequence[Slot], scratch_elements: int = 0) -> Plan:
        """The plan of ``slots``, signed with all that the ranks must agree on."""
        sign = signature(
            "all_reduce",
            algorithm,
            self.world,
            self.elements,
            self.elements_per_packet,
            self.missing,
            self.order,
        )
        return assemble(
            "all_reduce",
            algorithm,
            self.world,
            self.rank,
            self.elements_per_packet,
            sizes=(self.elements, self.elements),
            slots=slots,
            sign=sign,
            scratch_elements=scratch_elements,
        )


def segmented(
    world: int,
    rank: int,
    elements: int,
    elements_per_packet: int,
    order: tuple[int, ...] | None,
    missing: Missing,
    finish: Finish,
) -> SegmentedAllReduce:
    """Checks an all-reduce's arguments and cuts its buffer; ``order`` None means 0, 1, 2, ...

    Raises:
        ValueError: For a rank, count or order that the world does not allow, or a finish other than
            MEAN and WEIGHTED.
    """
    check_finish(finish, Finish.MEAN, Finish.WEIGHTED)
    check_world(world, rank, elements_per_packet)
    elements = check_count("elements", elements)
    order = tuple(range(world)) if order is None else order
    return SegmentedAllReduce(
        world=world,
        rank=rank,
        elements=elements,
        elements_per_packet=elements_per_packet,
        order=order,
        missing=missing,
        finish=finish,
        positions=check_order(order, world),
        segments=_cut(elements, world, elements_per_packet),
    )


@lru_cache(maxsize=256)
def _cut(elements: int, parts: int, elements_per_packet: int) -> tuple[Segment, ...]:
    cut = segments(elements, parts, elements_per_packet)
    return tuple([Segment(number, *borders) for number, borders in enumerate(cut)])
