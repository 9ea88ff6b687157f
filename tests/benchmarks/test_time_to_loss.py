"""Time to a validation loss: which runs there are, what their report says, and what it refuses."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import runner, tcp
from benchmarks.common.results import Result, append
from benchmarks.common.runner import one_by_one
from benchmarks.studies.time_to_loss import before, report
from benchmarks.studies.time_to_loss import study as command
from benchmarks.studies.time_to_loss.runs import PROFILES, VARIANTS, Budget, Run, runs

BUDGET = Budget(steps=20)


def entry(profile: str, variant: str, *curve: tuple[float, int, float], seed: int = 1) -> Result:
    run = Run(profile, variant, seed, BUDGET)
    return Result(run.settings, {"curve": [list(point) for point in curve]}, commit="abc")


SLOW = entry("home", "gloo, cubic", (0.0, 0, 4.0), (100.0, 10, 3.0), (200.0, 20, 2.0))
FAST = entry("home", "lossy", (0.0, 0, 4.0), (10.0, 10, 3.0), (20.0, 20, 2.0))
WORSE = entry("home", "lossy, DriftBound", (0.0, 0, 4.0), (10.0, 10, 3.5), (20.0, 20, 3.0))
CUT = entry("home", "gloo, bbr", (0.0, 0, 4.0), (950.0, 10, 3.0))
CUT_AT_ONCE = entry("cross-dc", "gloo, bbr", (0.0, 0, 4.0))


def test_a_whole_comparison_comes_before_the_next_seed() -> None:
    found = list(runs((1, 2), PROFILES, list(VARIANTS), BUDGET))
    pairs = sum(len(variant.profiles) for variant in VARIANTS.values())
    assert len(set(found)) == len(found) == 2 * pairs
    assert {run.profile for run in found if run.variant == "lossy, int8"} == {"home"}
    assert [run.seed for run in found[: len(found) // 2]] == [1] * (len(found) // 2)
    for run in found:
        assert Run.of(json.loads(json.dumps(run.settings))) == run
        assert run.config().seed == run.seed
    # What is trained differs in nothing but the variant.
    fields = ("steps", "seed", "layers", "width", "context", "batch", "loss")
    assert len({tuple(getattr(r.config(), f) for f in fields) for r in found if r.seed == 1}) == 1


def test_what_can_not_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, said in {
        ("--steps", "0"): "steps is 0, wanted at least 1",
        ("--width", "100"): "width is 100, wanted a multiple of 32",
        ("--limit", "nan"): "limit is nan, wanted seconds above 0",
        ("--seeds", "1", "1"): "seeds are [1, 1], wanted different numbers",
        ("--only", "profile=moon"): "profile is one of cross-dc, home, transatlantic, two-sites",
    }.items():
        with pytest.raises(SystemExit):
            runner.main(command.STUDY, wrong)
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="variant is 'mpi', wanted one of lossy, "):
        Run("home", "mpi", 1, BUDGET)


def test_the_time_is_where_the_curve_crosses_the_loss() -> None:
    curve = SLOW.figures["curve"]
    assert report.reached(curve, 2.5) == pytest.approx(150)
    assert report.reached(curve, 4.0) == 0
    assert report.reached(curve, 1.9) is None
    rising = [(0.0, 0, 4.0), (1.0, 10, 3.0), (2.0, 20, 3.5)]
    assert report.reached(rising, 3.0) == 1.0


def test_the_report_compares_with_the_faster_gloo() -> None:
    found = report.results([FAST, SLOW, WORSE, CUT, CUT_AT_ONCE])
    assert found["targets"] == {"home": {"1": pytest.approx(2.02)}}
    variants = found["networks"]["home"]
    assert variants["lossy"]["seconds"] == [pytest.approx(19.8)]
    assert (variants["lossy, DriftBound"]["seconds"], variants["gloo, bbr"]["all"]) == (
        [None],
        [None],
    )
    rows = {row.split(" | ")[1]: row for row in report.table(found).splitlines()[3:]}
    assert "| cross-dc | gloo, bbr | 1 | not reached | - | - | cut off | 4.0" in report.table(found)
    assert "| 19.8 | 19.8, 19.8 | 10.0x | 20.0 | 2.0000 |" in rows["lossy"]
    assert "| not reached | - | - | 20.0 | 3.0000 |" in rows["lossy, DriftBound"]
    assert "| not reached | - | - | cut off | 3.0000 |" in rows["gloo, bbr"]
    assert "| `home` | 4 | 198 s | 20 s (lossy) |" in report.caption(found)


def test_losses_are_summed_by_network_over_the_runs_of_lossy() -> None:
    counts = {"packets": 1000, "lost": 10, "queues": 2}
    counted = [replace(one, figures={**one.figures, "network": counts}) for one in (FAST, WORSE)]
    other = replace(SLOW, figures={**SLOW.figures, "network": counts})  # gloo's
    table = report.losses([*counted, other, CUT]).splitlines()
    assert table[2:] == ["| `home` | 2 | 2,000 | 1.00% | 4 |"]


def test_a_median_needs_every_seed() -> None:
    assert report.median([1.0, 5.0, 2.0]) == 2.0
    assert report.median([1.0, None, 2.0]) is None
    assert report.median([None]) is None


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([FAST], "no run of gloo"),
        ([CUT], "no run of gloo"),
        ([SLOW, entry("home", "lossy")], "no points"),
        ([SLOW, entry("home", "lossy", (0.0, 0, 4.0), (0.0, 10, 3.0))], "goes back"),
        ([SLOW, entry("home", "lossy", (0.0, 10, 4.0), (1.0, 10, 3.0))], "goes back"),
        ([SLOW, entry("home", "lossy", (0.0, 0, 4.0), (1.0, 20, float("nan")))], "loss of nan"),
        (
            [SLOW, replace(FAST, settings={**FAST.settings, "budget": {"steps": 5}})],
            "runs of 2 budgets, wanted one",
        ),
    ],
)
def test_records_that_make_no_sense_are_refused(made: list[Result], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        report.results(made)


def test_what_is_done_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the report of what there is goes between the marks, of this budget alone."""
    asked: list[Run] = []

    def measure(run: Run, options: argparse.Namespace | None) -> dict[str, Any]:
        asked.append(run)
        speed = 1 if VARIANTS[run.variant].backend == "lossy" else 4
        return {"curve": [[0.0, 0, 4.0], [speed * run.seed * 1.0, run.budget.steps, 2.0]]}

    study = replace(command.STUDY, measuring=one_by_one(measure))
    monkeypatch.setattr(tcp, "controls", lambda: ["cubic"])
    docs, results = tmp_path / "docs", tmp_path / "results.jsonl"
    docs.mkdir()
    marks = f"<!-- {report.NAME}: begin -->\n<!-- {report.NAME}: end -->\n"
    for page in (docs / "performance.md", tmp_path / "README.md"):
        page.write_text(f"before\n{marks}after\n")
    other = Run("home", "lossy", 1, Budget(steps=7))
    append(results, Result(other.settings, measure(other, None), commit="abc"))
    asked.clear()
    given = ["--results", str(results), "--report", str(docs), "--steps", "20", "--seeds"]
    assert runner.main(study, [*given, "1"]) == 0
    first = len(asked)
    # This kernel has no bbr.
    assert first == sum(len(one.profiles) for one in VARIANTS.values() if one.control != "bbr")
    assert runner.main(study, [*given, "1", "2"]) == 0
    assert [run.seed for run in asked[first:]] == [2] * first
    assert (docs / f"{report.NAME}.png").stat().st_size > 10_000
    kept = json.loads((docs / f"{report.NAME}.json").read_text())
    assert kept["networks"]["home"]["lossy"]["seeds"] == [1, 2]
    for page in (docs / "performance.md", tmp_path / "README.md"):
        text = page.read_text()
        assert (text[:7], text[-6:]) == ("before\n", "after\n")
        assert "docs/time-to-target.png" in text or "| home | lossy | 2 |" in text
    capsys.readouterr()


def test_old_results_stand_beside_new_ones() -> None:
    """Of those that were measured again."""
    now = entry("home", "lossy", (0.0, 0, 4.0), (5.0, 10, 3.0), (10.0, 20, 2.0))
    lines = before.table([SLOW, FAST, WORSE], [SLOW, now, WORSE]).splitlines()
    assert len(lines) == 3
    assert lines[2] == "| home | lossy | 1 | 19.8 | 9.9 | 10.0x | 20.0x |"
