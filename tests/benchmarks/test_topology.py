"""All-reduce between sites: the limit it is held against, and that bytes are those of the call."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from benchmarks.micro import topology
from lossycoll.lab.counters import LevelBytes
from tests.support.lab_kit import needs_lab


def options(**changes: Any) -> argparse.Namespace:
    given = {"sites": 2, "hosts": 2, "ranks": 2, "mib": 25.0, "mbit": 1000.0, "delay_ms": 20.0}
    given |= {"loss": 0.0, "burst": 1.0, "rounds": 1, "each": 3}
    return argparse.Namespace(**{**given, **changes})


def test_the_limit_is_of_the_way_between_sites() -> None:
    size = 25 * (1 << 20)
    # Two sites send each other the half of it twice; three send 4/3 of it.
    assert topology.limit(options()) == pytest.approx(size * 8e-9 + 0.04)
    assert topology.limit(options(sites=3)) == pytest.approx(size * 8e-9 * 4 / 3 + 0.04)
    assert topology.least_bytes(options(), 4) == 1.5 * size


def test_bytes_are_those_between_two_points() -> None:
    levels = [{"site": LevelBytes((n, 2 * n), (3 * n, n))} for n in (5, 12, 20)]
    counting = topology.Counting.__new__(topology.Counting)
    counting.levels = levels
    assert counting.between(1) == {"site": LevelBytes((8, 16), (24, 8))}


def test_the_first_of_a_row_are_not_counted() -> None:
    rows = [("a", 0, 9.0), ("a", 1, 1.0), ("slow", 0, 7.0), ("a", 0, 8.0), ("a", 1, 2.0)]
    made = [{"variant": v, "nth": n, "time": (0.0, t), "missing": 0.0} for v, n, t in rows]
    counting = topology.Counting.__new__(topology.Counting)
    none = LevelBytes((0, 0), (0, 0))
    counting.levels = [{"host": none, "site": none} for _ in range(len(rows) + 1)]
    assert topology._of_variant("a", [made, made], counting, 1).seconds == [1.0, 2.0]
    # One that is too slow to be repeated has no second.
    assert topology._of_variant("slow", [made, made], counting, 1).seconds == [7.0]


@pytest.mark.long
@needs_lab
def test_a_hierarchical_all_reduce_crosses_once() -> None:
    chosen = ["transpose", "hierarchical", "reliable-hierarchical"]
    assert topology.available([*chosen, "gloo-none"]) == chosen
    found, seen = topology.measure(options(mib=2.0, delay_ms=1.0, mbit=200.0), chosen)
    assert seen["sites"] == 2
    assert [one.variant for one in found] == chosen
    assert all(len(one.seconds) == 2 for one in found)
    flat, levels, exact = found
    least = topology.least_bytes(options(mib=2.0), 2)
    # Headers of packets and of frames are 6%. A reliable one sends again what the gateway's queue
    # drops, after the flat one has filled it: up to a seventh in tens of runs.
    assert least < levels.site_bytes < 1.2 * least
    assert least < exact.site_bytes < 1.4 * least
    # Each of a site's four ranks sends each of the other site's an eighth of the tensor, twice.
    assert flat.site_bytes > 3.9 * least
    assert exact.missing == 0
