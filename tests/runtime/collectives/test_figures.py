"""What a rank warns of by what it has counted."""

from __future__ import annotations

import pytest

from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.runtime.collectives.figures import Figures
from lossycoll.runtime.collectives.operations import Operations
from lossycoll.runtime.collectives.parts import Parts
from lossycoll.runtime.membership.group_state import Health


def test_overflow_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    health = Health(1, 4, addresses=[], liveness=10.0, control=None, on_failure=lambda error: None)
    parts = Parts(health, Options(), 0, None, None, Topology.flat(4))
    figures = Figures(parts, Operations(parts, timeout=1.0))
    for packets in (0, 7, 9):
        figures._warn_of_overflow(packets)
    (record,) = caplog.records
    assert "rank 1/4: the kernel dropped 7 packets" in record.getMessage()
    assert "net.core.rmem_max" in record.getMessage()
