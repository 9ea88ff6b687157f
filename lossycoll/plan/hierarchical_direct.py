"""Collectives that go straight from rank to rank, with large packets between ranks of one host.

Nothing can be saved where every rank has something of its own for each other one. So these are the
plans of ``data_movement``; only their streams within a host are of a level of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import data_movement
from .hierarchical import NAME
from .model import Level, Plan, Slot
from .registry import Algorithm, register
from .signature import signature
from .tiers import RELIABLE
from .topology import Topology
from .validation import check_topology

WITHIN = 1
"""The level of streams within a host."""


def with_large_packets(plan: Plan, topology: Topology) -> Plan:
    """``plan``, each of whose slots has one stream at most, with a level for those within a host.

    Args:
        plan: One of a single level.
        topology: That of its ranks.

    Returns:
        Its plan under the name of the algorithms that know hosts.
    """
    within = Level(plan.elements_per_packet * topology.host_packets, RELIABLE)
    here = topology.hosts[plan.rank]
    slots = []
    for slot in plan.slots:
        near = any(topology.hosts[peer] == here for peer in _peers(slot))
        slots.append(replace(slot, level=WITHIN) if near else slot)
    return replace(
        plan,
        algorithm=NAME,
        slots=tuple(slots),
        levels=(within,),
        signature=signature(plan.collective, NAME, plan.signature, *topology.fields),
    )


def _peers(slot: Slot) -> list[int]:
    peers = [*slot.sources, *[dest.peer for dest in slot.dests]]
    if len(peers) > 1:
        raise ValueError(f"slot {slot.number} has {len(peers)} streams, wanted one at most")
    return peers


def _known(build: Callable[..., Plan]) -> Callable[..., Plan]:
    """A builder that knows hosts, of one that doesn't."""

    def found(
        world: int, rank: int, *sizes: Any, topology: Topology | None = None, **options: Any
    ) -> Plan:
        plan = build(world, rank, *sizes, **options)
        return with_large_packets(plan, check_topology(topology, world))

    return found


all_to_all = _known(data_movement.all_to_all)
all_to_all_uneven = _known(data_movement.all_to_all_uneven)
gather = _known(data_movement.gather)
scatter = _known(data_movement.scatter)


def _register(
    build: Callable[..., Plan], collective: str, summary: str, gathers: bool = False
) -> None:
    register(
        Algorithm(
            collective=collective,
            name=NAME,
            build=build,
            summary=f"{summary}, within a host in large packets",
            steps=lambda world: min(1, world - 1),
            traffic=lambda world: (min(1, world - 1) if gathers else world - 1) / world,
            direct=True,
            levels=True,
        )
    )


_register(all_to_all, "all_to_all", "every rank sends each other one its chunk")
_register(all_to_all_uneven, "all_to_all_uneven", "the same, of chunks of any size")
_register(gather, "gather", "every rank sends its chunk to the root", gathers=True)
_register(scatter, "scatter", "the root sends every rank its chunk")
