"""Idle paths are kept alive, also sealed ones, by datagrams that their receivers believe."""

from __future__ import annotations

import time

import pytest

from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.reports import EngineStats

from .test_admission import Swarm

ENOUGH = 5


@pytest.mark.parametrize("sealed", [False, True], ids=["clear", "sealed"])
@pytest.mark.parametrize("keepalive", [0.0, 0.02], ids=["off", "on"])
def test_a_path_on_which_nothing_is_sent_is_kept_alive(sealed: bool, keepalive: float) -> None:
    swarm = Swarm(sealed=sealed, keepalive=keepalive)
    for number in range(2):
        swarm.come(number, f"peer {number}")
    swarm.mean([0, 1])
    group = EngineGroup(
        swarm.hosts[0], 0, 2, number=9, fault_group=9, options=swarm.options, members=[0, 1]
    )

    def received() -> EngineStats:
        return group.stats()

    def settled() -> int:
        """What the mean left behind has come once nothing comes for a while."""
        while True:
            before = received().control_received
            time.sleep(0.3)
            if keepalive or received().control_received == before:
                return received().control_received

    try:
        before, end = settled(), time.monotonic() + (20.0 if keepalive else 0.5)
        while received().control_received < before + ENOUGH and time.monotonic() < end:
            time.sleep(0.02)
        after = received()
    finally:
        group.close()
        swarm.close()
    assert (after.control_received - before >= ENOUGH) if keepalive else (
        after.control_received == before
    )
    assert after.forged == after.replayed == after.malformed == after.foreign == 0
