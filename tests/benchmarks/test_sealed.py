"""The benchmark of seals: which calls count, and what is compared."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.micro import sealed


def rows(times: list[tuple[str, int, float]], size: int = sealed.LARGE) -> list[dict[str, object]]:
    return [{"size": size, "way": way, "nth": n, "time": (0.0, t)} for way, n, t in times]


def test_the_first_of_a_turn_are_not_counted_and_the_last_rank_s_end_is() -> None:
    times = [("plain", 0, 9.0), ("plain", 1, 1.0), ("encrypt", 1, 2.0), ("authenticate", 1, 1.5)]
    later = [(way, n, t + 0.5) for way, n, t in times]
    (found,) = sealed.medians("1 Gbit/s", [rows(times), rows(later)], 1)
    assert found.seconds == {"plain": 1.5, "encrypt": 2.5, "authenticate": 2.0}
    assert found.ratio == pytest.approx(0.6)
    (row,) = sealed.cells([found])
    assert len(row) == len(sealed.HEADINGS)
    assert row[-2:] == ["0.60 of plain", "0.95, missed"]


def test_goals_are_of_the_wire_for_large_calls_and_of_the_time_for_small_ones() -> None:
    equal = dict.fromkeys(sealed.WAYS, 1.0)
    assert sealed.Measured("10 Gbit/s", sealed.LARGE, equal).goal == 0.6
    assert sealed.Measured("10 Gbit/s", sealed.SMALL, equal).goal == pytest.approx(1 / 1.15)


@pytest.mark.long
def test_all_ways_are_measured_over_loopback() -> None:
    found = sealed.measure("loopback", argparse.Namespace(rounds=1, each=2))
    assert [one.size for one in found] == [sealed.LARGE, sealed.SMALL]
    assert all(set(one.seconds) == set(sealed.WAYS) for one in found)
    assert all(second > 0 for one in found for second in one.seconds.values())
