"""The studies' runner, their results on disk, and the marks between which reports write."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main as run_study
from benchmarks.common import tables
from benchmarks.common.results import STUDIES, Piece, Result, append, load
from benchmarks.common.runner import PieceFailed, Study, batch_by_batch, main, only


@dataclass(frozen=True)
class Square(Piece):
    """What is measured is the square of ``number``."""

    kind: str
    number: float
    tags: tuple[str, ...] = ()


PIECES = [Square("even, plain", 2.0), Square("odd", 3.0), Square("even, plain", 4.0)]


def squares(log: list[list[float]], failing: float | None = None) -> Study[Square]:
    """Two at a time; ``log`` gets what was measured together."""

    def measure(batch: Sequence[Square], options: argparse.Namespace) -> list[Any]:
        log.append([piece.number for piece in batch])
        if failing in log[-1]:
            raise PieceFailed("no square")
        return [piece.number**2 for piece in batch]

    def write(results: Sequence[Result], folder: Path) -> str:
        return " ".join(f"{result.figures:g}" for result in results)

    return Study(
        name="squares",
        description="",
        plan=lambda options: PIECES,
        batches=lambda left: [left[i : i + 2] for i in range(0, len(left), 2)],
        measuring=batch_by_batch(measure),
        report=write,
    )


def test_what_is_done_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log: list[list[float]] = []
    results = tmp_path / "results.jsonl"
    given = ["--results", str(results), "--report", str(tmp_path)]
    assert main(squares(log, failing=4.0), given) == 1
    assert log == [[2.0, 3.0], [4.0]]
    shown = capsys.readouterr()
    assert "even, plain/4/: no square" in shown.err
    assert shown.out == ""  # no report of a study that failed
    assert main(squares(log), given) == 0
    assert log[2:] == [[4.0]]
    assert capsys.readouterr().out == "4 9 16\n"
    assert main(squares(log), [*given, "--only", "kind=even, plain", "--again"]) == 0
    assert log[3:] == [[2.0, 4.0]]
    assert len(results.read_text().splitlines()) == 5
    assert main(squares(log), [*given, "--report-only"]) == 0
    assert len(log) == 4
    planned = dataclasses.replace(squares(log), plan=lambda options: PIECES[1:])
    capsys.readouterr()
    assert main(dataclasses.replace(planned, reports_planned=True), given) == 0
    assert capsys.readouterr().out == "9 16\n"


def test_only_takes_what_fits() -> None:
    assert only(PIECES, ["number=2.0,3.0"]) == PIECES[:2]
    assert only(PIECES, ["number=2.0,3.0", "kind=odd"]) == PIECES[1:2]
    with pytest.raises(ValueError, match=r"wanted NAME=VALUE.*kind, number, tags"):
        only(PIECES, ["odd"])
    with pytest.raises(ValueError, match=r"number is one of 2\.0, 3\.0, 4\.0"):
        only(PIECES, ["number=5.0"])


def test_a_result_is_a_line_that_tells_what_where_and_when(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "results.jsonl"
    piece = Square("odd", 3.0, ("a", "b"))
    result = Result(piece.settings, {"found": 9}, "2026-11-22", "abc", "2 cores")
    append(path, result)
    assert list(json.loads(path.read_text())) == [
        *("key", "settings", "figures", "date", "commit", "machine")
    ]
    with path.open("a") as lines:
        lines.write('{"key": "odd/')  # as a crash leaves it
    append(path, dataclasses.replace(result, figures={"found": 10}))
    assert load(path) == {
        "odd/3/a;b": Result(piece.settings, {"found": 10}, *("2026-11-22", "abc"), "2 cores")
    }
    assert load(tmp_path / "none.jsonl") == {}


@pytest.mark.parametrize(
    "study", sorted(path.parent.name for path in STUDIES.glob("*/results.jsonl"))
)
def test_results_there_are_can_be_read(study: str) -> None:
    """And each has the settings of a piece that its study plans, by its names."""
    found = load(STUDIES / study / "results.jsonl")
    assert found
    command = import_module(f"benchmarks.studies.{study}.study").STUDY
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    piece = command.plan(parser.parse_args([]))[0]
    for result in found.values():
        assert list(result.settings) == list(piece.settings)
        assert type(piece).of(result.settings).key == result.key


@pytest.mark.parametrize("name", sorted(path.parent.name for path in STUDIES.glob("*/study.py")))
def test_a_study_is_run_by_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        run_study([name, "--help"])
    assert f"usage: python -m benchmarks {name} [-h]" in capsys.readouterr().out


def test_tables_go_between_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- one: begin -->\nold\n<!-- one: end -->\nb\n")
    tables.fill(page, {"one": tables.markdown(["x"], [["1"]]), "two": "not there"})
    wanted = "a\n<!-- one: begin -->\n\n| x |\n| --- |\n| 1 |\n\n<!-- one: end -->\nb\n"
    assert page.read_text() == wanted
    tables.fill(tmp_path / "none.md", {"one": ""})
    assert not (tmp_path / "none.md").exists()
    assert tables.markdown(["x"], []) == "No runs yet."
