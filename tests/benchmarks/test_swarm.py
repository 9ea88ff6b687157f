"""A model trained by a swarm: which runs there are, what its report says, and what it refuses."""

from __future__ import annotations

import argparse
import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import runner, tcp
from benchmarks.common.results import Result, append
from benchmarks.common.runner import one_by_one
from benchmarks.studies.swarm import report
from benchmarks.studies.swarm import study as command
from benchmarks.studies.swarm.runs import (
    FAULTS,
    JOINED,
    PEERS,
    REFERENCE,
    VARIANTS,
    Budget,
    Run,
    runs,
)
from benchmarks.studies.swarm.study import check_faults
from lossycoll.errors import LossyError

BUDGET = Budget(steps=80)
FAULTY = "moshpit, faults"
THEIRS = "hivemind, cubic"


def figures(run: Run, loss: float = 2.0) -> dict[str, Any]:
    """As a run writes them: a peer is missed from the round after its end, and there again."""
    at = {fault: round(fault.share * run.budget.steps / 10) * 10 for fault in run.faults}
    rounds, members = [], PEERS
    for step in range(10, run.budget.steps + 1, 10):
        rounds.append([step, step / 10, members, members - 0.1, 0.0, 0.1, 0.2])
        for fault in run.faults:
            members += (at[fault] == step) * (1 if fault.kind == JOINED else -1)
    return {
        "curve": [[0.0, 0, 5.0], *([r[1], r[0], loss + 10 / r[0] - 0.125] for r in rounds)],
        "losses": {"0": loss, "1": loss * 1.001},
        "rounds": rounds,
        "failed": [],
        "faults": [
            {
                "kind": fault.kind,
                "peer": fault.peer,
                "step": step,
                "seconds": step / 10,
                "rounds": 2,
                **({"caught up": {"after": 1.5, "step": step}} if fault.kind == JOINED else {}),
            }
            for fault, step in at.items()
        ],
        "network": {"bytes": 2**20, "lost": 1, "queues": 0},
    }


def entry(variant: str, loss: float = 2.0, seed: int = 1) -> Result:
    run = Run(variant, seed, BUDGET)
    return Result(run.settings, figures(run, loss), commit="abc")


def test_a_whole_comparison_comes_before_the_next_seed() -> None:
    found = list(runs((1, 2), list(VARIANTS), BUDGET))
    assert len(set(found)) == len(found) == 2 * len(VARIANTS)
    assert [run.seed for run in found] == [1] * len(VARIANTS) + [2] * len(VARIANTS)
    for run in found:
        assert Run.of(json.loads(json.dumps(run.settings))) == run
        assert bool(run.faults) == ("faults" in run.variant)
    assert len({run.train() for run in found if run.seed == 1}) == 1


def test_faults_leave_the_peers_that_others_need() -> None:
    """Peer 0 is the one that is looked at, and has the directory; as many come as are killed."""
    peers = [fault.peer for fault in FAULTS]
    assert len(set(peers)) == len(peers) == 4
    assert 0 not in peers
    assert sum(fault.kind == JOINED for fault in FAULTS) == 2
    assert [fault.share for fault in FAULTS] == sorted(fault.share for fault in FAULTS)


def test_what_can_not_be_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for wrong, said in {
        ("--steps", "0"): "steps is 0, wanted at least 1",
        ("--steps", "15"): "steps is 15, wanted a multiple of every, 10",
        ("--width", "100"): "width is 100, wanted a multiple of 32",
        ("--limit", "nan"): "limit is nan, wanted seconds above 0",
        ("--seeds", "1", "1"): "seeds are [1, 1], wanted different numbers",
        ("--hivemind", str(tmp_path / "none")): "No such file",
    }.items():
        with pytest.raises(SystemExit):
            runner.main(command.STUDY, wrong)
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="variant is 'mpi', wanted one of moshpit, "):
        Run("mpi", 1, BUDGET)


def test_hivemind_runs_where_an_interpreter_has_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.missing("") == ("hivemind",)
    assert "pip install hivemind" in capsys.readouterr().err
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "hivemind.py").write_text("raise ImportError('it is broken')\n")
    with pytest.raises(ValueError, match="can't import hivemind: ImportError: it is broken"):
        command.missing(str(python))
    (tmp_path / "hivemind.py").write_text("")
    assert command.missing(str(python)) == ()
    monkeypatch.setattr(tcp, "allowed", lambda: ["cubic"])
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    planned = command.plan(parser.parse_args(["--hivemind", str(python), "--seeds", "1"]))
    assert THEIRS in {run.variant for run in planned}
    assert "bbr" not in {VARIANTS[run.variant].control for run in planned}


def test_faults_that_have_not_happened_are_refused() -> None:
    run = Run(FAULTY, 1, BUDGET)
    good = figures(run)
    check_faults(run.faults, good)
    check_faults((), figures(Run(REFERENCE, 1, BUDGET)))
    for change, said in (
        (lambda f: f["faults"].pop(), "3 faults have happened, wanted 4"),
        (lambda f: f["faults"][0].update(rounds=0), "wasn't killed, or had no round"),
        (lambda f: f["faults"][1].pop("caught up"), "hasn't caught up"),
        (lambda f: [r.__setitem__(2, PEERS) for r in f["rounds"]], "no round of 7"),
        (lambda f: [r.__setitem__(2, PEERS - 1) for r in f["rounds"]], "no round of 8"),
    ):
        bad = copy.deepcopy(good)
        change(bad)
        with pytest.raises(LossyError, match=said):
            check_faults(run.faults, bad)


def test_the_report_compares_seed_by_seed() -> None:
    made = [
        entry(REFERENCE, 2.0),
        entry(REFERENCE, 3.0, seed=2),
        entry(FAULTY, 2.01),
        entry(FAULTY, 3.06, seed=2),
        entry(THEIRS, 1.99),
    ]
    found = report.results(made)
    assert found["variants"][FAULTY]["against"] == pytest.approx([0.005, 0.02])
    rows = {row.split(" | ")[0].strip("| "): row for row in report.table(found).splitlines()[2:]}
    assert "| 2, 3 |" not in rows[FAULTY]
    assert "| 1, 2 | 2.5363 | +1.25% (+0.50%, +2.00%) |" in rows[FAULTY]
    assert "| 1.5 to 1.5 |" in rows[FAULTY]
    assert "| 1 | 1.9910 | -0.50% (-0.50%, -0.50%) |" in rows[THEIRS]
    assert f"`{FAULTY}` ends within 1% of `moshpit` for 1 of 2 seeds." in report.verdict(found)
    assert report.common_seeds(found) == [1]
    curves = report.curves_of(found["variants"][REFERENCE], [1, 2])
    assert [curves[seed][-1][1] for seed in (1, 2)] == [80, 80]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ([entry(FAULTY)], "no run of 'moshpit' with seed 1"),
        ([entry(REFERENCE, float("nan"))], "a loss of nan"),
        ([replace(entry(REFERENCE), figures={"curve": [], "losses": {}})], "no points"),
        (
            [
                entry(REFERENCE),
                replace(
                    entry(FAULTY),
                    figures={"curve": [[0.0, 0, 4.0], [0.0, 10, 3.0]], "losses": {"0": 3.0}},
                ),
            ],
            "goes back",
        ),
        (
            [entry(REFERENCE), Result(Run(REFERENCE, 2, Budget(steps=20)).settings, {})],
            "runs of 2 budgets, wanted one",
        ),
    ],
)
def test_records_that_make_no_sense_are_refused(made: list[Result], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        report.results(made)


def test_what_is_done_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without hivemind the others run, and the report of what there is goes between the marks."""
    asked: list[Run] = []

    def measure(run: Run, options: argparse.Namespace) -> dict[str, Any]:
        asked.append(run)
        return figures(run)

    study = replace(command.STUDY, measuring=one_by_one(measure))
    results = tmp_path / "results.jsonl"
    page = tmp_path / "moshpit.md"
    marks = f"<!-- {report.NAME}: begin -->\n<!-- {report.NAME}: end -->\n"
    page.write_text(f"before\n{marks}after\n")
    append(results, entry(THEIRS))
    given = ["--results", str(results), "--report", str(tmp_path), "--steps", "80", "--seeds"]
    assert runner.main(study, [*given, "1"]) == 0
    ours = [name for name, variant in VARIANTS.items() if variant.by == "moshpit"]
    assert [run.variant for run in asked] == ours
    assert runner.main(study, [*given, "1", "2"]) == 0
    assert [run.seed for run in asked] == [1] * len(ours) + [2] * len(ours)
    assert (tmp_path / f"{report.NAME}.png").stat().st_size > 10_000
    kept = json.loads((tmp_path / f"{report.NAME}.json").read_text())
    assert kept["variants"][REFERENCE]["seed"] == [1, 2]
    assert kept["variants"][THEIRS]["seed"] == [1]
    text = page.read_text()
    assert (text[:7], text[-6:]) == ("before\n", "after\n")
    assert f"| {THEIRS} | 1 |" in text
    assert "left out" in capsys.readouterr().err
