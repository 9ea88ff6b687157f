"""The simulator beside the laboratory: networks can be, and a table says what both found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.results import Result
from benchmarks.studies.simulation import study
from benchmarks.studies.simulation.study import CALLS, CELLS, SETTLE, Cell


def run(milliseconds: float, missing: float) -> dict[str, Any]:
    """The first calls don't count: they are far slower, and lose all."""
    seconds = [99.0] * SETTLE + [1e-3 * milliseconds] * (CALLS - SETTLE)
    return {
        "sent": 9000,
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
    far = {"laboratory": [run(100, 0.02)], "simulated": [run(111, 0.03)]}
    path = replace(CELLS[1], pacing="path")
    results = [Result(path.settings, far), Result(CELLS[0].settings, figures)]
    study.report(results, tmp_path)
    lines = page.read_text().splitlines()
    assert lines[4] == (
        "| 2 hosts, 100 Mbit/s, 10 ms, 4 MiB | port | 110 (100 to 120) | 99 | -10% "
        "| 3.00% | 3.00% | 0.5 |"
    )
    assert "| path | 100 (100 to 100) | 111 | +11% | 2.00% | 3.00% |" in lines[5]
    port, other = (text for text in lines if text.startswith("With"))
    assert "`pacing=port`, 1 of 1 networks have times within 10%" in port
    assert "12), and 1 a missing share within the counting error" in port
    assert "`pacing=path`, 0 of 1" in other
    assert "and 0 a missing" in other
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
