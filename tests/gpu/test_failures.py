"""Failures on a GPU: tests/gpu/failures.py check by check, and a rank that is killed."""

from __future__ import annotations

import signal

import pytest

from tests.gpu.checks import has_cuda, names_of, needs_gpu
from tests.gpu.killed import DEVICE, Survived, rank_until_a_loss
from tests.gpu.runner import Found, run_table
from tests.support.failure_cases import LIVENESS, QUIET, SLACK, must_name_the_lost
from tests.support.harness import Ranks

FAILURES = "tests.gpu.failures"

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def failures() -> dict[str, Found]:
    return run_table(FAILURES, env={"LOSSYCOLL_LOG": "off"})


@needs_gpu
@pytest.mark.parametrize("name", names_of(FAILURES))
def test_failure(failures: dict[str, Found], name: str) -> None:
    failures[name].must_pass()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_a_rank_that_is_killed_with_copies_in_flight(device: str) -> None:
    env = {**QUIET, DEVICE: device}
    with Ranks(rank_until_a_loss, 2, env, fresh=has_cuda()) as ranks:
        for number in range(2):
            ranks.wait_for(number, "ready")
        begin = ranks.signal(1, signal.SIGKILL)
        (outcome,) = ranks.collect(100, but=[1])
    assert not outcome.error, str(outcome)
    found = outcome.value
    assert isinstance(found, Survived)
    must_name_the_lost(found.caught, device, rank=0, world=2, victim=1, since=begin)
    assert found.usable
    assert found.synchronized - begin < LIVENESS + 2 * SLACK
