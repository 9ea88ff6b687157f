"""Whom the errors of operations name."""

from __future__ import annotations

from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.runtime.collectives.group_context import GroupContext
from lossycoll.runtime.collectives.operations import Operations
from lossycoll.runtime.core.call import CallOptions, Collective, Operation
from lossycoll.runtime.world.group_state import Health


def test_a_partially_delivered_operation_names_those_that_took_part_in_it() -> None:
    health = Health(
        2, 4, addresses=list("abcd"), liveness=10.0, control=None, on_failure=lambda error: None,
        outlive=True,
    )  # fmt: skip
    options = Options()
    operations = Operations(
        GroupContext(health, options, 0, None, None, Topology.flat(4)), timeout=1.0
    )
    for rank in (0, 3):
        health.on_lost(rank, 0.0, True)
    operation = Operation(
        operations, Collective("all_reduce", "int64", 9), CallOptions(options), 1.0
    )
    operation.members = (1, 2, 3)
    error = operations._died_midway(operation)
    assert error.peer == 3
    assert "rank 3 (d) died" in str(error)
    assert "rank 0" not in str(error)
