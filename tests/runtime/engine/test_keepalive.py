"""Idle paths are kept alive, also sealed ones, by datagrams that their receivers believe."""

from __future__ import annotations

import time

import pytest

from lossycoll.runtime.engine.binding import EngineGroup
from tests.support.waiting import until

from .test_admission import Swarm

ENOUGH = 5
QUIET = 0.3
"""Seconds in which all has come that the calls before have left behind."""


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
    counts = [group.stats().control_received]

    def is_quiet() -> bool:
        time.sleep(QUIET)
        counts.append(group.stats().control_received)
        return counts[-1] == counts[-2]

    try:
        if keepalive:
            until(lambda: group.stats().control_received >= counts[0] + ENOUGH, "datagrams")
        else:
            until(is_quiet, "silence")
        after = group.stats()
    finally:
        group.close()
        swarm.close()
    assert after.forged == after.replayed == after.malformed == after.foreign == 0
