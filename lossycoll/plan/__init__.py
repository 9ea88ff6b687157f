"""Collectives as data: pure functions that say what each rank does. docs/plans.md explains them.

    plan = transpose.all_reduce(world=4, rank=1, elements=1 << 20, elements_per_packet=362,
                                order=draw_order(seed, group, op, 4))
    slot_table, edge_table = encode(plan)

Builders: ``ring.all_reduce``; ``transpose.all_reduce`` and ``.reduce_scatter``; ``tree.broadcast``
and ``.barrier``; ``exchange.all_gather``, ``.all_to_all``, ``.all_to_all_uneven``, ``.gather``,
``.scatter`` and ``.point_to_point``. ``rename`` and ``leave_out`` make them plans for the ranks
that are left. ``reference.execute`` defines what their result is.
"""

from __future__ import annotations

from . import data_movement as exchange
from . import faults as inject
from . import parity, ring, transpose, tree
from .encode import encode
from .model import Combine, Edge, Finish, Missing, Plan, Slot, Target, packet_count
from .order import draw_order, segments
from .signature import signature
from .survivor_plans import leave_out, rename

__all__ = [
    "Combine",
    "Edge",
    "Finish",
    "Missing",
    "Plan",
    "Slot",
    "Target",
    "draw_order",
    "encode",
    "exchange",
    "inject",
    "leave_out",
    "packet_count",
    "parity",
    "rename",
    "ring",
    "segments",
    "signature",
    "transpose",
    "tree",
]
