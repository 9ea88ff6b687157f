"""The simulator beside the laboratory: networks can be, and a table says what both found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.results import Result
from benchmarks.studies.simulation import study
from benchmarks.studies.simulation.study import CALLS, CELLS, SETTLE, Cell


def run(milliseconds: float, missing: float) -> dict[str, Any]:
    """The first calls don't count: they are far slower, and lose all."""
    seconds = [99.0] * SETTLE + [1e-3 * milliseconds] * (CALLS - SETTLE)
    return {
        "seconds": seconds,
        "missing": [1.0] * SETTLE + [missing] * (CALLS - SETTLE),
        "wakes_late_ms": 0.5,
    }


def test_twelve_networks_differ_and_have_2_to_8_hosts() -> None:
    assert len({cell.key for cell in CELLS}) == len({cell.name for cell in CELLS}) == 12
    assert {cell.hosts for cell in CELLS} == {2, 3, 4, 8}
    assert all(cell.network.hosts == cell.hosts for cell in CELLS)


def test_the_table_has_medians_of_both_and_the_error(tmp_path: Path) -> None:
    figures = {"laboratory": [run(100, 0.02), run(120, 0.04)], "simulated": [run(99, 0.03)]}
    page = tmp_path / "simulate-accuracy.md"
    page.write_text("<!-- laboratory: begin -->\n<!-- laboratory: end -->\n")
    study.report([Result(CELLS[0].settings, figures)], tmp_path)
    row = page.read_text().splitlines()[4]
    assert row == (
        "| 2 hosts, 100 Mbit/s, 10 ms, 4 MiB | 110 (100 to 120) | 99 | -10% | 3.00% | 3.00% | 0.5 |"
    )
    assert (tmp_path / "simulation.json").exists()


def test_a_simulated_run_counts_what_a_laboratory_does() -> None:
    found = study.simulated(Cell(2, 100, 5, 0.25, loss=0.05), seed=1)
    assert len(found["seconds"]) == len(found["missing"]) == CALLS
    assert found["dropped"]["lost"] > 0
    assert found["sent"] > found["dropped"]["lost"]


def test_sleepers_are_watched() -> None:
    late: list[float] = []
    with study.watched(late):
        while len(late) < 2:
            pass
    assert all(value >= 0 for value in late)
