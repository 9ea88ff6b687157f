"""The threshold's warm-up, choice and return to the warm-up, without ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lossycoll.simulate import choose
from lossycoll.train.dropcompute.threshold import DropSettings, Threshold

M = 4
WARM_UP = 6


def machine(**rest: Any) -> Threshold:
    return Threshold(
        DropSettings(**{"micro_batches": M, "skip": 2, "warm_up": WARM_UP, "window": 4, **rest})
    )


def warmed(tables: np.ndarray, rank: int, **rest: Any) -> Threshold:
    """One that has measured; ``tables``: seconds [ranks, steps, M + 1]."""
    threshold = machine(**rest)
    for step in range(2 + WARM_UP):
        threshold.step_began(None if step == 0 else 9.0)
        assert not threshold.due
        row = tables[rank, max(0, step - 2), :M]
        threshold.step_ended([lap for lap in row if lap > 0])
    threshold.step_began(9.0)
    assert threshold.due
    assert threshold.adopt(tables)
    return threshold


def made(seed: int = 0, ranks: int = 3) -> np.ndarray:
    """Exponential times above 1 s, and steps of the slowest and 0.5 s."""
    draws = np.random.default_rng(seed)
    times = 1 + draws.exponential(0.7, (ranks, WARM_UP, M))
    walls = times.sum(axis=2).max(axis=0) + 0.5
    return np.concatenate([times, np.broadcast_to(walls[:, None], (ranks, WARM_UP, 1))], axis=2)


def test_all_ranks_take_the_threshold_that_is_chosen_from_all_times() -> None:
    tables = made()
    times = tables[:, :, :M].transpose(1, 0, 2)
    wanted = choose(times, 0.5, cut="started")
    assert wanted.speedup > 1.01
    found = [warmed(tables, rank) for rank in range(3)]
    for threshold in found:
        assert threshold.seconds == found[0].seconds == pytest.approx(wanted.threshold, rel=1e-6)
        assert threshold.choice.drop_rate == pytest.approx(wanted.drop_rate)
        assert threshold.warm_up_left == 0
        assert not threshold.due
    rate = warmed(tables, 1, drop_rate=0.1)
    asked = choose(times, 0.5, drop_rate=0.1, cut="started")
    assert rate.seconds == pytest.approx(asked.threshold, rel=1e-6)
    left = choose(times, 0.5, cut="threshold").threshold
    assert left != pytest.approx(wanted.threshold, rel=1e-3)
    assert warmed(tables, 2, cut="threshold").seconds == pytest.approx(left, rel=1e-6)


def test_the_table_is_what_was_measured() -> None:
    threshold = machine(skip=0, warm_up=3)
    for laps in ([1.0, 2.0], [], [0.0, 1.0, 1.0, 1.0]):
        threshold.step_began(5.0)
        threshold.step_ended(laps)
    threshold.step_began(None)
    table = threshold.table()
    assert table.tolist() == [
        [1.0, 2.0, 0, 0, 5.0],
        [0, 0, 0, 0, 5.0],
        [1e-9, 1.0, 1.0, 1.0, 0],
    ]
    assert threshold.adopt(table[None])


def test_a_lost_rank_has_no_say_and_an_empty_warm_up_is_repeated() -> None:
    tables = made()
    tables[1] = 0
    left = warmed(np.delete(tables, 1, axis=0), 0)
    assert warmed(tables, 0).seconds == left.seconds
    threshold = machine(skip=0)
    for _ in range(WARM_UP):
        threshold.step_ended([])
    assert not threshold.adopt(np.zeros((2, WARM_UP, M + 1)))
    assert (threshold.warm_up_left, threshold.seconds) == (WARM_UP, math.inf)


def test_a_slow_step_in_the_warm_up_changes_little() -> None:
    tables = made()
    usual = warmed(tables, 0)
    tables[2, 3, 1] = 600
    assert warmed(tables, 0).seconds == pytest.approx(usual.seconds, rel=0.1)
    assert warmed(tables, 0).choice.left_out == (3,)


@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_it_is_measured_again_when_micro_batches_take_another_time(factor: float) -> None:
    tables = made()
    threshold = warmed(tables, 0)
    rows = [row[:M] for row in tables[0]]

    def cut(laps: np.ndarray) -> list[float]:
        begun = np.concatenate([[0.0], np.cumsum(laps)[:-1]])
        return [float(lap) for lap, at in zip(laps, begun, strict=True) if at <= threshold.seconds]

    for row in rows * 2:
        threshold.step_ended(cut(row))
        assert not threshold.outdated
    for _ in range(4):
        threshold.step_ended(cut(rows[0] * factor))
    assert threshold.outdated
    threshold.restart()
    assert (threshold.warm_up_left, threshold.seconds, threshold.outdated) == (
        WARM_UP,
        math.inf,
        False,
    )
    threshold.request()
    assert not threshold.outdated  # it is being measured already


def test_it_is_measured_again_when_somebody_asks() -> None:
    threshold = warmed(made(), 0)
    assert not threshold.outdated
    threshold.request()
    assert threshold.outdated
    given = machine(threshold=2.0)
    given.request()
    given.step_ended([1.0])
    assert (given.outdated, given.due, given.seconds) == (False, False, 2.0)
