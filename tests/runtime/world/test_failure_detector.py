"""The failure detector alone: what it finds, told what was heard when."""

from __future__ import annotations

import itertools
import random

import pytest

from lossycoll.runtime.world.failure_detector import (
    ARRIVAL_EACH,
    ARRIVAL_SECONDS,
    PROBE_SECONDS,
    SILENT_SHARE,
    FailureDetector,
    Findings,
)

LIVENESS = 8.0
HEARTBEAT = LIVENESS / 8


def detector(ranks: list[int], *, expected: int = 0) -> FailureDetector:
    made = FailureDetector(LIVENESS, SILENT_SHARE * LIVENESS, 100.0)
    made.watch(ranks, 100.0, expected=expected, pause=HEARTBEAT)
    return made


def run(made: FailureDetector, begin: float, end: float, heard: list[int]) -> Findings:
    """Ticks whenever it is due, each time after ``heard`` were heard; the last findings."""
    now, found = begin, Findings({}, (), ())
    while now < end:
        now = min(max(made.due, now), end)
        for rank in heard:
            made.heard(rank, now)
        found = made.tick(now)
        if found.silent:
            break
    return found


def test_silence_is_reported_after_its_share_of_the_liveness_and_not_before() -> None:
    made = detector([1, 2])
    assert not run(made, 100, 100 + 0.7 * LIVENESS, [2]).silent
    found = made.tick(made.due)
    assert found.silent.keys() == {1}
    assert 0.7 * LIVENESS < found.silent[1] < 0.71 * LIVENESS
    made.forget(1)
    assert not run(made, made.due, made.due + 10 * LIVENESS, [2]).silent


def test_who_is_late_is_asked_before_it_is_given_up() -> None:
    made = detector([1, 2])
    assert run(made, 100, 100 + 2 * HEARTBEAT, [2]).late == ()
    found = run(made, made.due, 100 + 4 * HEARTBEAT, [2])
    assert found.late == (1,)
    assert made.due - (100 + 4 * HEARTBEAT) <= HEARTBEAT / 4 + 0.001, "questions are repeated soon"


def test_ones_own_sleep_is_nobodys_silence_but_is_remembered() -> None:
    made = detector([1])
    made.tick(101.0)
    made.heard(1, 101.5)
    found = made.tick(101.5 + LIVENESS)
    assert not found.silent
    assert made.in_doubt
    now = 101.5 + LIVENESS
    made.heard(1, now)  # may have come before the sleep
    made.tick(now)
    assert made.in_doubt
    made.heard(1, now + 1.1 * HEARTBEAT)
    assert not made.in_doubt
    assert run(made, now + 1.1 * HEARTBEAT, now + 3 * LIVENESS, []).silent.keys() == {1}


def test_a_sleep_never_puts_a_sign_of_life_into_the_future() -> None:
    made = detector([1])
    made.heard(1, 100 + 2 * LIVENESS)  # it had come while this one slept
    made.tick(100 + 2 * LIVENESS)
    found = run(made, 100 + 2 * LIVENESS, 100 + 3 * LIVENESS, [])
    assert found.silent.keys() == {1}
    assert found.silent[1] < 0.9 * LIVENESS


def test_a_broken_connection_has_its_rank_looked_for_ever_less_often_and_not_for_long() -> None:
    made = detector([1, 2])
    made.suspect(2, 100.5)
    assert made.due <= 100.5
    looked, now = [], 100.5
    while now < 103:
        made.heard(1, now)
        made.heard(2, now)  # it lives, but may be ending
        if 2 in made.tick(now).doubtful:
            looked.append(now)
        now = made.due
    pauses = [after - before for before, after in itertools.pairwise(looked)]
    assert looked[0] == 100.5
    assert looked[-1] - looked[0] <= PROBE_SECONDS[1]
    assert pauses == sorted(pauses)
    assert 5 < len(looked) < 12


def test_who_is_expected_is_looked_for_until_it_is_heard() -> None:
    made = detector([1, 2], expected=3)
    assert made.tick(100.0).doubtful == ()
    made.heard(1, 100.01)
    assert made.tick(100.0 + ARRIVAL_SECONDS).doubtful == (2,)
    made.heard(2, 100.05)
    assert made.tick(100.2).doubtful == ()


def test_a_coordinator_of_many_is_looked_for_later() -> None:
    made = detector([1], expected=500)
    assert made.tick(100.0 + ARRIVAL_SECONDS).doubtful == ()
    assert made.tick(100.0 + 500 * ARRIVAL_EACH).doubtful == (1,)


def test_nobody_else_is_judged() -> None:
    made = detector([1])
    made.heard(5, 101)
    assert set(made.heard_at) == {1}
    made.watch([2, 3], 101.0, expected=0, pause=HEARTBEAT)
    assert run(made, 101, 101 + LIVENESS, []).silent.keys() == {2, 3}


@pytest.mark.parametrize("seed", range(20))
def test_delays_and_sleeps_of_less_than_half_the_liveness_are_no_death(seed: int) -> None:
    draw = random.Random(seed)
    made = detector([1])
    now, heard_at = 100.0, 100.0
    for _ in range(500):
        now = made.due + draw.choice([0, 0, 0, draw.uniform(0, 0.45 * LIVENESS)])
        if now - heard_at > draw.uniform(0, 0.45 * LIVENESS):
            heard_at = now
            made.heard(1, now)
        assert not made.tick(now).silent
