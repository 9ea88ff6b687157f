"""Collectives as data: pure functions that say what each rank does. docs/plans.md explains them.

    plan = hierarchical.all_reduce(world=4, rank=1, elements=1 << 20, elements_per_packet=362,
                                   order=draw_order(seed, group, op, 4))
    slot_table, edge_table = encode(plan)

Builders are in ``hierarchical`` and ``ring`` (all-reduces), ``reduce_scatter``, ``copies``
and ``data_movement``. Each is registered as an algorithm: ``algorithms()`` lists them,
``register`` adds one (docs/extending.md). ``rename`` and ``leave_out`` turn plans into plans for
the ranks that are left. What the result of a plan is, tests/oracle defines.
"""

from __future__ import annotations

from . import copies, data_movement, hierarchical, reduce_scatter, ring  # they register
from .assembly import leave_out, rename
from .model import (
    Combine,
    Delivery,
    Edge,
    Finish,
    Level,
    Missing,
    Own,
    Plan,
    Slot,
    Target,
    encode,
    packet_count,
    signature,
)
from .order import draw_order, finer_elements, owner_count, segments
from .registry import (
    Algorithm,
    algorithm_names,
    algorithms,
    choose_algorithm,
    default_algorithm,
    register,
    unregister,
)
from .topology import Topology

__all__ = [
    "Algorithm",
    "Combine",
    "Delivery",
    "Edge",
    "Finish",
    "Level",
    "Missing",
    "Own",
    "Plan",
    "Slot",
    "Target",
    "Topology",
    "algorithm_names",
    "algorithms",
    "choose_algorithm",
    "copies",
    "data_movement",
    "default_algorithm",
    "draw_order",
    "encode",
    "finer_elements",
    "hierarchical",
    "leave_out",
    "owner_count",
    "packet_count",
    "reduce_scatter",
    "register",
    "rename",
    "ring",
    "segments",
    "signature",
    "unregister",
]
