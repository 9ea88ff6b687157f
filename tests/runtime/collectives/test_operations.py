"""Whom the errors of operations name, and what the engine is told of the options."""

from __future__ import annotations

from itertools import permutations

import pytest

from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.runtime.collectives.group_context import GroupContext
from lossycoll.runtime.collectives.operations import Operations, lossy_delivery
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


MEANS = (
    (Options(max_missing=0.01), True, 64),
    (Options(max_missing=0.01, repair=0), False, 64),
    (Options(max_missing=0.01, fec=0), True, 0),
    (Options(max_missing=0.01, repair=0, fec=0), False, 0),
)
"""Options of equal values; whether the engine chooses the rounds, and how much parity."""


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), *permutations((1, 0, 2))])
def test_what_the_engine_is_told_depends_on_what_is_set_and_not_on_the_call_before(
    order: tuple[int, ...],
) -> None:
    lossy_delivery.cache_clear()
    for number in order:
        options, chooses, most_parity = MEANS[number]
        told = lossy_delivery(options)
        assert (told.choose_rounds, told.most_parity) == (chooses, most_parity)
