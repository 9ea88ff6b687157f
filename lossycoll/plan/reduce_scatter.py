"""Reduce-scatter by tiers: a chunk is summed up within each host and site, and crosses as one sum.

The unit's holder of the chunk (``tiers.holder``) adds up, and only it sends to the chunk's owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from .assembly import Sums, assemble, copy_own, from_input, from_slot
from .hierarchical import NAME
from .model import Finish, Plan, signature
from .registry import DIRECT, Algorithm, register
from .tiers import Tree, below, meeting, tree_of
from .topology import Topology
from .validation import (
    check_counts,
    check_finish,
    check_slots,
    check_topology,
    check_world,
    others,
    starts,
)


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
    sums = _Rank(tree, rank, sizes, in_place=in_place)
    for chunk in others(world, rank):
        if sizes[chunk]:
            sums.contribute(chunk)
    if sizes[rank]:
        # Flat, an owner needs no more than survivors give: where none is told they are counted.
        sums.reduce(finish, 0 if topology.is_flat else world)
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
        levels=tree.levels,
    )


class _Rank(Sums):
    """One rank's slots of a reduce-scatter."""

    def __init__(self, tree: Tree, rank: int, sizes: tuple[int, ...], *, in_place: bool) -> None:
        super().__init__()
        self.tree, self.rank, self.in_place = tree, rank, in_place
        self.sizes, self.begin = sizes, starts(sizes)

    def contribute(self, chunk: int) -> None:
        """Slots of the rank for another rank's chunk: it sends its own part of it to the holder of
        its unit; or adds up, and goes on as the holder one tier further up."""
        units = below(self.tree, self.rank, chunk)
        last = max([t for t, ranks in enumerate(units) if len(ranks) > 1], default=None)
        if not self.in_place or any(ranks[0] != self.rank for ranks in units):
            last = None
        own = from_input(self.begin[chunk])
        for t, (to, *sources) in enumerate(units):
            if to != self.rank:
                self._send(t, chunk, to, own)
                return
            if sources:
                how = {"offset": self.begin[chunk]} if t == last else {}
                own = self._add(t, chunk, sources, own, **how)
        self._send(len(units), chunk, chunk, own)

    def reduce(self, finish: Finish, full_weight: int) -> None:
        """The rank's own chunk."""
        offset = self.begin[self.rank] if self.in_place else 0
        own = from_input(self.begin[self.rank])
        for t, unit in enumerate(self.tree.path):
            _, *sources = meeting(unit, self.rank)
            if sources:
                how = {"offset": offset, "finish": finish, "full_weight": full_weight}
                is_root = unit is self.tree.root
                own = self._add(t, self.rank, sources, own, **(how if is_root else {}))
        if len(self.sizes) == 1:
            self.sent.append(copy_own(self.rank, offset, own["own_offset"], self.sizes[0]))

    def _send(self, t: int, chunk: int, to: int, own: dict[str, Any]) -> None:
        level, number = self.tree.tiers[t].up, t * len(self.sizes) + chunk
        self.send(number, self.sizes[chunk], to, level, own)

    def _add(
        self, t: int, chunk: int, sources: Sequence[int], own: dict[str, Any], **how: Any
    ) -> dict[str, Any]:
        """Adds up; returns what the sum is as a contribution."""
        level, number = self.tree.tiers[t].up, t * len(self.sizes) + chunk
        self.add(number, self.sizes[chunk], sources, level, own, **how)
        return from_slot(number)


REDUCE_SCATTER: Final = register(
    Algorithm(
        collective="reduce_scatter",
        name=NAME,
        build=reduce_scatter,
        summary="every rank sends each owner its chunk",
        relays=True,
        **DIRECT,
    )
)
IN_PLACE: Final = replace(REDUCE_SCATTER, build=partial(reduce_scatter, in_place=True))
"""Not registered: its buffers are others than a reduce-scatter's."""
