"""The option liveness, from the group to the failure detector: no rank is waited for longer."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.backend import group_steps
from tests.support.harness import Ranks, init, note, run_good

GIVEN = 12.5
LIVENESS = 10.0


def rank_hands_on(rank: int, world: int) -> list[float]:
    """The liveness that the group's failure detectors were made with."""
    made: list[float] = []

    class Seen(group_steps.ControlPlane):
        def __init__(self, rank: int, world: int, liveness: float, **rest: Any) -> None:
            made.append(liveness)
            super().__init__(rank, world, liveness, **rest)

    group_steps.ControlPlane = Seen  # type: ignore[misc]
    init(pg_options={"liveness": GIVEN})
    dist.destroy_process_group()
    return made


def test_the_group_hands_its_liveness_on() -> None:
    assert run_good(rank_hands_on, 2) == [[GIVEN]] * 2


def rank_sums(rank: int, world: int) -> float:
    """Sums until a rank is lost; returns time.monotonic(), which is the same in all processes."""
    init()
    tensor = torch.ones(200_000)
    for count in range(10**9):
        try:
            dist.all_reduce(tensor.fill_(1))
        except lossycoll.PeerLostError:
            break
        if count == 3:
            note("ready")
    return time.monotonic()


@pytest.mark.long
@pytest.mark.serial
def test_a_stopped_rank_is_given_up_soon_after_its_liveness() -> None:
    """Twice the liveness would not pass: most tests' bounds are of a few seconds, for a machine
    that is busy, and are beyond that."""
    env = {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_LIVENESS": str(LIVENESS)}
    with Ranks(rank_sums, 3, env) as ranks:
        for number in range(3):
            ranks.wait_for(number, "ready")
        begin = ranks.signal(1, signal.SIGSTOP)
        survivors = ranks.collect(100, but=[1])
    for outcome in survivors:
        assert not outcome.error, str(outcome)
        assert 0.5 * LIVENESS < outcome.value - begin < 1.4 * LIVENESS
