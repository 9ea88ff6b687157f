"""What a rank warns of by what it has counted."""

from __future__ import annotations

import pytest

from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.runtime.collectives.group_context import GroupContext
from lossycoll.runtime.collectives.group_stats import GroupStats
from lossycoll.runtime.collectives.operations import Operations
from lossycoll.runtime.engine.reports import EngineStats
from lossycoll.runtime.world.group_state import Health


def stats_of(options: Options, rank: int = 0) -> GroupStats:
    health = Health(
        *(rank, 4),
        addresses=["10.0.0.1:1", "10.0.0.1:2", "10.0.0.2:1", "10.0.0.2:2"],
        liveness=10.0,
        control=None,
        on_failure=lambda error: None,
        group="mesh",
    )
    context = GroupContext(health, options, 0, None, None, Topology.flat(4))
    return GroupStats(context, Operations(context, timeout=1.0))


def test_much_that_is_missing_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    stats = stats_of(Options())
    for missing, received in ((99, 100), (101, 10_100), (200, 1800), (300, 1700)):
        stats._warn(
            EngineStats(packets_missing=missing, packets_received=received),
        )
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("rank 0/4: group mesh: 10.0% of the packets were missing (200 of 2000)")
    assert "lossycoll.DriftBound(model, optimizer)" in text
    assert "Options(max_missing='1%')" in text


def test_what_is_made_up_for_or_another_ranks_to_say_is_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    much = EngineStats(packets_missing=500, packets_received=500)
    stats_of(Options(max_missing=0.05))._warn(much)
    driftless = stats_of(Options())
    driftless.made_up_for = True
    driftless._warn(much)
    stats_of(Options(), rank=1)._warn(much)
    assert caplog.records == []
    stats_of(Options(), rank=2)._warn(much)
    assert len(caplog.records) == 1


def test_overflow_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    health = Health(1, 4, addresses=[], liveness=10.0, control=None, on_failure=lambda error: None)
    context = GroupContext(health, Options(), 0, None, None, Topology.flat(4))
    stats = GroupStats(context, Operations(context, timeout=1.0))
    for packets in (0, 7, 9):
        stats._warn(EngineStats(socket_overflow=packets))
    (record,) = caplog.records
    assert "rank 1/4: the kernel dropped 7 packets" in record.getMessage()
    assert "net.core.rmem_max" in record.getMessage()
