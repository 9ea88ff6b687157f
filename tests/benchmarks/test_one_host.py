"""Calls on one host: what is measured, what is wanted of it, and that both backends take part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.local_job import run_job
from benchmarks.micro import one_host


def row(**changes: Any) -> dict[str, Any]:
    given = {"ranks": 2, "collective": "all_reduce", "bytes": 1 << 20, "calls": 100}
    given |= {"lossy_us": 100.0, "gloo_us": 310.0, "lossy_cpu_us": 50.0, "gloo_cpu_us": 100.0}
    return {**given, **changes}


def test_a_barrier_has_no_size_and_a_trip_two_ends() -> None:
    every, of = one_host.COLLECTIVES, (4096, 1 << 20, 1 << 22)
    two, four = (one_host.cells(world, every, of) for world in (2, 4))
    assert [size for name, size in two if name == "barrier"] == [4096]
    assert [size for name, size in two if name == "trip"] == [4096, 1 << 20]
    assert "trip" not in dict(four)
    assert [size for name, size in four if name == "broadcast"] == list(of)


def test_what_misses_its_goal_says_so() -> None:
    assert one_host.goal("all_gather", 4096) == 5
    assert one_host.goal("all_gather", 1 << 20) == 3
    assert one_host.goal("broadcast", 4096) == 2
    assert "missed" not in "".join(one_host.shown(row()))
    assert "2.90|3, missed" in "|".join(one_host.shown(row(gloo_us=290.0)))
    assert one_host.shown(row(lossy_cpu_us=61.0))[-1] == "0.61, missed"
    rows = [row(), row(collective="broadcast", gloo_us=150.0, lossy_cpu_us=70.0)]
    verdict = one_host.verdict(rows)
    assert "1 of 2 reach their goals" in verdict
    assert "broadcast of 1 MiB, 2 ranks. CPU" in verdict
    assert "1 of 2 are at most 0.6" in verdict
    assert "0.70" in verdict


def test_calls_after_computing_have_a_table_and_a_goal_of_their_own(tmp_path: Path) -> None:
    page = tmp_path / one_host.AFTER.page
    page.write_text("<!-- one-host-after: begin -->\n<!-- one-host-after: end -->\n")
    rows = [row(goal=2.0), row(goal=2.0, ranks=4, gloo_us=190.0)]
    one_host.report_after(rows, tmp_path)
    two, four = page.read_text().splitlines()[4:6]
    assert two.startswith("| 2 | all_reduce | 1 MiB | 100 | 310 | 3.10 | 2 | ")
    assert four.startswith("| 4 | all_reduce | 1 MiB | 100 | 190 | 1.90 | 2, missed | ")


@pytest.mark.long
@pytest.mark.parametrize(("apart", "compute_ms"), [(False, 0), (True, 0), (False, 1)])
def test_backends_take_turns(apart: bool, compute_ms: float) -> None:
    config = {"sizes": (4096,), "seconds": 0.01, "apart": apart, "compute_ms": compute_ms}
    chosen = ("all_reduce", "barrier", "trip")
    rows = run_job("benchmarks.micro.one_host", {**config, "collectives": chosen}, 2)
    assert [found["collective"] for found in rows] == list(chosen)
    for found in rows:
        counted = one_host.BLOCK_CALLS[0] - (0 if apart or compute_ms else one_host.WARM_UP)
        assert found["calls"] >= one_host.LEAST_ROUNDS * counted
        for name in one_host.BACKENDS:
            assert 0 < found[f"{name}_p10_us"] <= found[f"{name}_us"]
            assert found[f"{name}_cpu_us"] > 0
