"""Reduce-scatter by tiers: a chunk is summed up within each host and site, and crosses as one sum.

On a flat topology every rank sends each owner its chunk.
The unit's holder of the chunk adds up, and only it sends to the chunk's owner. Consecutive chunks
have different holders (``tiers.holder``), so that all ranks of a host take part in what crosses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from .assembly import assemble, copy_own
from .hierarchical import NAME, check_slots
from .model import Combine, Edge, Finish, Own, Plan, Slot, Target, signature
from .registry import Algorithm, register
from .tiers import Tree, around, crossing, holder, number_outside, tree_of, within
from .topology import Topology
from .validation import check_counts, check_finish, check_topology, check_world, others, starts


def reduce_scatter(
    world: int,
    rank: int,
    counts: int | Sequence[int],
    elements_per_packet: int,
    *,
    finish: Finish = Finish.STRATIFIED,
    topology: Topology | None = None,
    in_place: bool = False,
) -> Plan:
    """Mean of all ranks' chunk ``r``, at rank ``r``; slot ``t * world + s`` adds up chunk ``s`` in
    a unit of tier ``t``.

    The owner of a chunk cannot be redrawn, so STRATIFIED is the unbiased finish (WEIGHTED is as
    well, with the right weights); without loss MEAN gives the same. One step for each tier. The
    stratum of a STRATIFIED finish is what the owner's host (and site) contributes; the others are
    those of other units of the topmost tier. ``counts`` are the elements of each rank's chunk; one
    number: of every chunk. ValueError for finish NONE.

    ``in_place``: in one buffer, for callers that send again what is lost. The rank's own chunk
    becomes the mean. Chunks of which it holds the sum of its unit become that sum: what is lost of
    them is the unit's contribution, and the rank's to send again. Nobody else in the unit has lost
    anything.
    """
    check_finish(finish, Finish.MEAN, Finish.STRATIFIED, Finish.WEIGHTED)
    check_world(world, rank, elements_per_packet)
    sizes = check_counts("counts", counts, world)
    topology = check_topology(topology, world)
    tree = tree_of(topology, rank, elements_per_packet)
    check_slots(len(tree.tiers) * world)
    # Flat, an owner needs no more than survivors give: where none is told they are counted.
    full_weight = 0 if topology.is_flat else world
    sums = _Sums(tree, world, rank, sizes, full_weight, in_place=in_place)
    for chunk in others(world, rank):
        if sizes[chunk]:
            sums.contribute(chunk)
    if sizes[rank]:
        sums.reduce(finish)
    name = f"{NAME} in place" if in_place else NAME
    return assemble(
        "reduce_scatter",
        NAME,
        world,
        rank,
        elements_per_packet,
        sizes=(sum(sizes), sum(sizes) if in_place else sizes[rank]),
        slots=[*sums.sent, *sums.waiting],
        sign=signature("reduce_scatter", name, world, sizes, elements_per_packet, *topology.fields),
        scratch_elements=sums.scratch,
        levels=tree.levels,
    )


class _Sums:
    """One rank's slots of a reduce-scatter."""

    def __init__(
        self,
        tree: Tree,
        world: int,
        rank: int,
        sizes: tuple[int, ...],
        full_weight: int,
        *,
        in_place: bool,
    ) -> None:
        self.full_weight = full_weight
        self.tree, self.world, self.rank, self.in_place = tree, world, rank, in_place
        self.sizes, self.begin = sizes, starts(sizes)
        self.scratch = 0
        self.sent: list[Slot] = []
        """Slots that wait for nothing."""
        self.waiting: list[Slot] = []

    def contribute(self, chunk: int) -> None:
        """Slots of the rank for another rank's chunk: it sends its own part of it to the holder of
        its unit; or adds up, and goes on as the holder one tier further up."""
        tier = crossing(self.tree, self.rank, chunk)
        unit = self.tree.path[tier]
        number = number_outside(unit, unit.part_of[self.rank], chunk)
        units = within(self.tree, tier, number)
        last = max([t for t, holders in enumerate(units) if len(holders) > 1], default=None)
        if not self.in_place or any(holders[0] != self.rank for holders in units):
            last = None
        own = None
        for t, holders in enumerate(units):
            if holders[0] != self.rank:
                self._send(chunk, t, holders[0], own)
                return
            if len(holders) > 1:
                keep = {"offset": self.begin[chunk]} if t == last else {}
                own = self._sum(t, chunk, holders[1:], own, **keep)
        self._send(chunk, tier, chunk, own)

    def reduce(self, finish: Finish) -> None:
        """The rank's own chunk."""
        own: int | None = None
        rank, offset = self.rank, self.begin[self.rank] if self.in_place else 0
        for t, unit in enumerate(self.tree.path):
            outside = around(unit.parts, unit.part_of[rank])
            sources = tuple([holder(part, number_outside(unit, i, rank)) for i, part in outside])
            how = {"offset": offset, "finish": finish, "full_weight": self.full_weight}
            if sources:
                own = self._sum(t, rank, sources, own, **(how if unit is self.tree.root else {}))
            elif unit is self.tree.root:  # a single rank
                number = t * self.world + rank
                self.sent.append(copy_own(number, offset, self.begin[rank], self.sizes[rank]))

    def _own(self, chunk: int, own: int | None) -> dict[str, Any]:
        """``own``: the slot with what the rank holds of the chunk; None: its input."""
        if own is None:
            return {"own": Own.INPUT, "own_offset": self.begin[chunk]}
        return {"own": Own.SLOT, "feed": own}

    def _send(self, chunk: int, t: int, to: int, own: int | None) -> None:
        number = t * self.world + chunk
        slots = self.sent if own is None else self.waiting
        slots.append(
            Slot(
                number,
                0,
                self.sizes[chunk],
                dests=(Edge(to, number),),
                target=Target.NONE,
                level=self.tree.tiers[t].up,
                **self._own(chunk, own),
            )
        )

    def _sum(
        self, t: int, chunk: int, sources: tuple[int, ...], own: int | None, **how: Any
    ) -> int:
        """Adds up; returns the slot's number. ``how``: of a sum that is stored in the output, at
        ``offset``; others go to scratch memory."""
        number = t * self.world + chunk
        if not how:
            how = {"offset": self.scratch, "target": Target.SCRATCH}
            self.scratch += self.sizes[chunk]
        self.waiting.append(
            Slot(
                number,
                length=self.sizes[chunk],
                sources=sources,
                combine=Combine.ADD,
                level=self.tree.tiers[t].up,
                **how,
                **self._own(chunk, own),
            )
        )
        return number


REDUCE_SCATTER: Final = register(
    Algorithm(
        collective="reduce_scatter",
        name=NAME,
        build=reduce_scatter,
        summary="every rank sends each owner its chunk",
        steps=lambda world: 1 if world > 1 else 0,
        traffic=lambda world: (world - 1) / world,
        default=True,
        direct=True,
        levels=True,
        relays=True,
    )
)
IN_PLACE: Final = replace(REDUCE_SCATTER, build=partial(reduce_scatter, in_place=True))
"""Not registered: its buffers are others than a reduce-scatter's."""
