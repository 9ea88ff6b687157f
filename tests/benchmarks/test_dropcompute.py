"""The benchmark of DropCompute: which runs there are, what its report says, and what it refuses."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common import runner
from benchmarks.common.results import Result
from benchmarks.common.runner import one_by_one
from benchmarks.studies.dropcompute import report
from benchmarks.studies.dropcompute import study as command
from benchmarks.studies.dropcompute.runs import (
    MICRO_BATCHES,
    PLANNED,
    RANKS,
    VARIANTS,
    Budget,
    Run,
    planned,
)

BUDGET = Budget(steps=8, skip=1, warm_up=2)


def entry(variant: str, *, completed: int = 48, step: float = 1.0, threshold: Any = None) -> Result:
    """Micro-batches of 0.05 s, of one rank 0.075 s; a step of 0.1 s beside."""
    laps = np.full((BUDGET.steps, RANKS, MICRO_BATCHES), 0.05)
    laps[:, 2] = 0.075
    figures = {
        "step_seconds": [step] * BUDGET.steps,
        "completed": [48] * 3 + [completed] * 5,
        "losses": [(0, 5.0), (8, 3.0)],
        "threshold": threshold,
        "promised": None if threshold is None else 1.1,
        "laps": laps.tolist(),
    }
    return Result(Run(variant, 1.0, BUDGET).settings, figures, commit="abc")


PLAIN = entry("no threshold")
CUT = entry("DropCompute", completed=44, step=0.75, threshold=0.61)


def test_each_delay_has_a_run_to_compare_with() -> None:
    runs = planned(BUDGET)
    assert len(set(runs)) == len(runs) == sum(map(len, PLANNED.values()))
    for factor, variants in PLANNED.items():
        assert report.REFERENCE in variants
        assert not VARIANTS[report.REFERENCE].dropping
        # Whatever the delay, a micro-batch takes as long on average.
        assert Run(variants[0], factor, BUDGET).clean * (1 + factor / 2) == pytest.approx(
            BUDGET.mean
        )
    for run in runs:
        assert Run.of(json.loads(json.dumps(run.settings))) == run


def test_the_report_has_the_prediction_beside_what_was_measured() -> None:
    (delay,) = report.results([PLAIN, CUT])["delays"].values()
    assert delay["communication"] == pytest.approx(0.1)
    plain, cut = delay["variants"].values()
    assert (plain["speedup"], plain["dropped"], plain["predicted"]) == (1.0, 0.0, None)
    assert cut["speedup"] == pytest.approx(44 / 48 / 0.75)
    assert cut["dropped"] == pytest.approx(4 / 48)
    # Begun by 0.61 s: 9 micro-batches of the slow rank, which ends after 0.675 s.
    assert cut["predicted_dropped"] == pytest.approx(3 / 48)
    assert cut["predicted"] == pytest.approx(45 / 48 * (0.9 + 0.1) / (0.675 + 0.1))
    assert cut["promised"] == 1.1
    text = report.table(report.results([PLAIN, CUT]))
    assert "| x 1 | no threshold | - | 1.0000 | 0.0% | 1.000 | - | - | 3.0000 | 8.0 |" in text
    assert "| x 1 | DropCompute | 0.6100 | 0.7500 | 8.3% (6.2%) | 1.222 | 1.210 | 1.100 |" in text
    unused = report.results([PLAIN, entry("fixed divisor", threshold=math.inf)])
    assert unused["delays"]["1"]["variants"]["fixed divisor"]["threshold"] is None


def test_records_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="no run of 'no threshold'"):
        report.results([CUT])
    settings = Run("DropCompute", 1.0, replace(BUDGET, steps=9)).settings
    other = replace(CUT, settings=settings)
    with pytest.raises(ValueError, match="runs of 2 budgets"):
        report.results([PLAIN, other])
    few = replace(PLAIN, figures={**PLAIN.figures, "laps": [[[0.1] * 3] * 2] * BUDGET.steps})
    with pytest.raises(ValueError, match="wanted \\(steps, 4, 12\\)"):
        report.results([few])


def test_what_can_not_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, said in {
        ("--width", "100"): "width is 100, wanted a multiple of 32",
        ("--steps", "35"): "wanted more than the 35 in which nothing is dropped",
        ("--mean", "nan"): "mean is nan, wanted seconds above 0",
        ("--only", "variant=none"): "variant is one of DropCompute, fixed divisor, ",
    }.items():
        with pytest.raises(SystemExit):
            runner.main(command.STUDY, wrong)
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="variant is 'x', wanted one of no threshold, "):
        Run("x", 1.0, BUDGET)


def test_what_is_done_is_not_run_again(tmp_path: Path) -> None:
    asked: list[Run] = []

    def measure(run: Run, options: argparse.Namespace) -> Any:
        asked.append(run)
        steps = np.full((run.budget.steps, RANKS, MICRO_BATCHES), 0.05)
        made = PLAIN if run.variant == report.REFERENCE else CUT
        return {
            **made.figures,
            "laps": steps.tolist(),
            "step_seconds": [1.0] * run.budget.steps,
            "completed": [48] * run.budget.steps,
        }

    study = replace(command.STUDY, measuring=one_by_one(measure))
    docs, results = tmp_path / "docs", tmp_path / "results.jsonl"
    docs.mkdir()
    page = docs / "dropcompute.md"
    marks = f"<!-- {report.MARKS}: begin -->\n<!-- {report.MARKS}: end -->\n"
    page.write_text(f"before\n{marks}after\n")
    given = ["--results", str(results), "--report", str(docs), "--steps", "40"]
    assert runner.main(study, [*given, "--only", f"variant={report.REFERENCE}"]) == 0
    assert len(asked) == len(PLANNED)
    assert runner.main(study, given) == 0
    assert len(asked) == len(set(asked)) == sum(map(len, PLANNED.values()))
    assert (docs / "dropcompute.png").stat().st_size > 10_000
    text = page.read_text()
    assert (text[:7], text[-6:]) == ("before\n", "after\n")
    assert "| x 4 | given up when late |" in text
    assert set(json.loads((docs / "dropcompute.json").read_text())["delays"]) == {"1", "4"}
