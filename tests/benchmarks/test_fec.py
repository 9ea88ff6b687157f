"""The study of parity: its engines leave what the formulas say, and the report shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common.results import Result
from benchmarks.studies.fec.cells import VARIANTS, Cell, predicted
from benchmarks.studies.fec.report import write
from benchmarks.studies.fec.study import residual

PAGE = "<!-- fec: begin -->\nbefore\n<!-- fec: end -->\n"


def test_what_fixed_parity_leaves() -> None:
    found = residual(Cell("residual", "fec=0.2", 0.2, 4), 16)
    assert found["recovered"] > 1000 < found["missing"]
    assert found["residual"] == pytest.approx(found["predicted"], rel=0.1)
    assert found["overhead"] == pytest.approx(0.2, rel=0.1)


def test_which_variants_have_a_formula() -> None:
    known = {name for name in VARIANTS if predicted(name, 0.1, 1.0) is not None}
    assert known == {"nothing", "fec=0.05", "fec=0.1", "fec=0.2", "repair=1"}
    assert predicted("repair=1", 0.1, 4.0) == pytest.approx(0.01)
    assert predicted("fec=0.2", 0.1, 1.0) < predicted("fec=0.2", 0.1, 8.0)  # type: ignore[operator]


def test_the_report_fills_the_page_with_what_there_is(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(PAGE)
    write([], tmp_path)
    assert page.read_text() == PAGE
    assert not (tmp_path / "fec.json").exists()
    some = [
        Result(
            Cell("residual", variant, 0.05, burst).settings,
            {"residual": 0.002, "missing": 20, "overhead": 0.1, "predicted": 0.0025},
            commit="abc",
        )
        for variant in ("fec=0.1", "max_missing=0.01")
        for burst in (1, 4)
    ]
    write(some, tmp_path)
    text = page.read_text()
    assert "| lost | fec=0.1 | max_missing=0.01 |\n" in text
    assert "| 5.0% in bursts of 4 | 0.2% (0.25%) for 10.0% |" in text
    assert (tmp_path / "fec.png").exists()
