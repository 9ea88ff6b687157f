"""The study of bad wires: which cells there are, and that its report takes each kind of them."""

from __future__ import annotations

from pathlib import Path

from benchmarks.common.results import Result
from benchmarks.studies.lossy_links import report
from benchmarks.studies.lossy_links.cells import METHODS, Cell, cells, variants


def entry(cell: Cell) -> Result:
    seconds = {variant: [0.2, 0.2, 0.3] for variant in variants(cell)}
    figures = {"limit": cell.limit, "seconds": seconds, "missing": {"lossy": 0.01}}
    return Result(cell.settings, figures)


def test_steps_of_methods_are_measured_with_many_hosts() -> None:
    found = list(cells())
    assert len({cell.key for cell in found}) == len(found)
    steps = [cell for cell in found if cell.what in METHODS]
    assert {(cell.what, cell.hosts) for cell in steps} >= {(name, 8) for name in METHODS}
    assert all(variants(cell) == ("lossy",) for cell in steps)
    assert all(cell.network.hosts == cell.hosts for cell in steps)
    assert len({cell.name for cell in found}) == len(found)


def test_the_report_takes_each_kind(tmp_path: Path) -> None:
    kinds = ("all-reduce", "step", *METHODS)
    chosen = [next(cell for cell in cells() if cell.what == what) for what in kinds]
    (tmp_path / "performance.md").write_text("<!-- wire: begin -->\n<!-- wire: end -->\n")
    report.write([entry(cell) for cell in chosen], tmp_path)
    text = (tmp_path / "performance.md").read_text()
    rows = [line for line in text.splitlines() if "hosts, " in line]
    assert len(rows) == len(kinds)
    (row,) = (line for line in rows if "sharded step" in line)
    # Longest over median of the second and third; nothing else was measured.
    assert "| 1.20 | 1.00% | - | - | - | - | - | - |" in row
