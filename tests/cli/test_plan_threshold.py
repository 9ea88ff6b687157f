"""lossycoll plan-threshold: what it prints, draws and refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.delays import Delayed
from lossycoll.cli import main as cli
from lossycoll.cli.plan_threshold import HARMLESS_DROP, as_json
from lossycoll.simulate import choose
from lossycoll.simulate.threshold import choose_at
from lossycoll.simulate.times import load
from tests.support import dropcompute_checks as checks

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "dropcompute-times.json"
KEYS = {"threshold", "drop_rate", "speedup", "curve"}


def write(folder: Path, steps: Any, communication: Any = 0.1) -> Path:
    path = folder / "times.json"
    report = {"micro_batch_seconds": steps, "communication_seconds": communication}
    path.write_text(json.dumps(report))
    return path


def delayed(*shape: int) -> list[Any]:
    drawn: list[Any] = Delayed(0.1).draw(np.random.default_rng(3), shape).tolist()
    return drawn


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["plan-threshold", *map(str, arguments)]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_example_is_what_its_command_writes() -> None:
    assert EXAMPLE.read_text(encoding="utf-8") == checks.example()
    loaded = load(EXAMPLE)
    assert loaded.times.shape == checks.EXAMPLE_SHAPE
    assert int(np.isnan(loaded.times).sum()) == 3
    assert loaded.communication == checks.EXAMPLE_COMMUNICATION


def test_as_a_person_runs_it(tmp_path: Path) -> None:
    """In a process of its own: standard output is the JSON alone, and nothing needs torch."""
    picture = tmp_path / "curve.png"
    probe = (
        "import sys; from lossycoll.cli.main import main; status = main(); "
        "sys.exit(status or 3 * ('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, "plan-threshold", EXAMPLE, "--json", "--picture", picture],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert report.keys() == KEYS
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "picture" in done.stderr
    loaded = load(EXAMPLE)
    choice = choose(loaded.times, loaded.communication)
    assert [report["threshold"], report["drop_rate"], report["speedup"]] == [
        choice.threshold,
        choice.drop_rate,
        choice.speedup,
    ]
    assert report["curve"] == [dataclasses.asdict(point) for point in choice.curve]
    assert list(tmp_path.iterdir()) == [picture]


def test_the_table_has_the_curve_and_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, EXAMPLE)
    loaded = load(EXAMPLE)
    choice = choose(loaded.times, loaded.communication)
    assert "recorded: 24 steps, 4 ranks, 8 micro-batches; 0.15 s" in text
    assert "log-normal" in text
    assert f"threshold {choice.threshold:.4g} s: {choice.drop_rate:.1%} of the" in text
    assert f"effective speed-up {choice.speedup:.3f}" in text
    assert text.count("# <-") == 1
    assert choice.drop_rate > HARMLESS_DROP
    assert "--drop-rate 0.1 has a speed-up of 1.0" in text
    assert "outlier" not in text


def test_lines_fit_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["plan-threshold", str(EXAMPLE), "--workers", "4096"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_page_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    name = str(EXAMPLE.relative_to(ROOT))
    assert cli.main(["plan-threshold", name]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    page = (ROOT / "docs" / "dropcompute.md").read_text(encoding="utf-8")
    (shown,) = (
        block for block in page.split("\n\n") if f"$ lossycoll plan-threshold {name}" in block
    )
    assert [line[4:] for line in shown.splitlines()[1:]] == printed


def test_another_scale(capsys: pytest.CaptureFixture[str]) -> None:
    def asked(*arguments: object) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(said(capsys, EXAMPLE, "--json", *arguments))
        assert report.keys() == KEYS
        return report

    loaded = load(EXAMPLE)
    report = asked("--workers", 512, "--seed", 5)
    choice, _ = choose_at(loaded.times, loaded.communication, 512, seed=5)
    assert report == as_json(choice)
    assert report == asked("--workers", 512, "--seed", 5)
    assert report != asked("--workers", 512, "--seed", 6)
    gains = [asked("--workers", workers)["speedup"] for workers in (2, 16, 512)]
    assert gains == sorted(gains)
    assert gains[-1] > gains[0] + 0.1

    text = said(capsys, EXAMPLE, "--workers", 512, "--seed", 5)
    assert "predicted: 512 ranks, 50 steps, each rank's drawn from the 96" in text
    assert "expect more" in text
    assert f"threshold {choice.threshold:.4g} s" in text
    assert "expect more" not in said(capsys, EXAMPLE, "--workers", 16)


def test_a_wanted_drop_rate_and_another_cut(capsys: pytest.CaptureFixture[str]) -> None:
    for workers in ((), ("--workers", 64)):
        report = json.loads(said(capsys, EXAMPLE, "--json", "--drop-rate", 0.05, *workers))
        assert 0.04 < report["drop_rate"] <= 0.05
        assert report["speedup"] > 1
    text = said(capsys, EXAMPLE, "--drop-rate", 0.05)
    assert text.count("# <-") == 1
    assert "--drop-rate" not in text
    started = json.loads(said(capsys, EXAMPLE, "--json", "--cut", "started"))
    finished = json.loads(said(capsys, EXAMPLE, "--json"))
    assert started["speedup"] < finished["speedup"]


def test_no_threshold_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, [[[0.2, 0.2, 0.2]] * 3] * 4)
    report = json.loads(said(capsys, path, "--json"))
    assert (report["threshold"], report["drop_rate"], report["speedup"]) == (None, 0.0, 1.0)
    picture = tmp_path / "flat.png"
    text = said(capsys, path, "--picture", picture)
    assert "no threshold: dropping doesn't pay" in text
    assert "a micro-batch looks normal, 0.2 s" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_slow_rank_and_an_outlier_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = np.array(delayed(22, 4, 6))
    steps[:, 2] *= 1.5
    steps[9, 0, 2] = 90.0
    text = said(capsys, write(tmp_path, steps.tolist()))
    assert "left out as outliers: 1 of the steps (9)" in text
    assert "rank 2 computes" in text
    assert "longer than the median rank" in text


def test_a_large_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, delayed(44, 16, 12), communication=2)
    report = json.loads(said(capsys, path, "--workers", 4096, "--json"))
    assert report["speedup"] > 1.1


STEP = [[0.1, 0.2], [0.1]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("\xff", "is not JSON"),
        ("[]", "a list at the top; wanted: {"),
        ("null", "null at the top"),
        ("{}", "there is no 'micro_batch_seconds' but no key; wanted: {"),
        ('{"micro_batch_seconds": []}', "no 'communication_seconds' but 'micro_batch_seconds'"),
        ('{"times": 1, "communication_seconds": 1}', "but 'times', 'communication_seconds'"),
    ],
)
def test_files_of_another_kind_are_refused(
    text: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "times.json"
    path.write_text(text, encoding="latin-1")
    refused(path, complaint, capsys)


@pytest.mark.parametrize(
    ("steps", "communication", "complaint"),
    [
        ([], 0, "micro_batch_seconds: an empty list; wanted: at least one of its steps"),
        (3, 0, "micro_batch_seconds: the number 3; wanted: a list of steps"),
        ([STEP, []], 0, "step 1: an empty list; wanted: at least one of its ranks"),
        ([STEP, {"a": 1}], 0, "step 1: an object; wanted: a list of ranks"),
        ([STEP, [[0.1], []]], 0, "step 1, rank 1: an empty list"),
        ([STEP, [0.1, 0.2]], 0, "step 1, rank 0: the number 0.1; wanted: a list of micro-batches"),
        ([STEP, [[[0.1]], [0.1]]], 0, "step 1, rank 0, micro-batch 0: a list; wanted: a number"),
        ([STEP, [[0.1, None], [1]]], 0, "step 1, rank 0, micro-batch 1: null; wanted: a number"),
        ([STEP, [[0.1], ["1"]]], 0, "step 1, rank 1, micro-batch 0: the text '1'"),
        ([STEP, [[0.1], [True]]], 0, "step 1, rank 1, micro-batch 0: true"),
        ([STEP, [[0.1], [1, float("nan")]]], 0, "step 1, rank 1, micro-batch 1: nan s; wanted: a"),
        ([STEP, [[0.1, float("inf")], [1]]], 0, "step 1, rank 0, micro-batch 1: inf s"),
        ([STEP, [[0.1, 10**400], [1]]], 0, "step 1, rank 0, micro-batch 1: inf s"),
        ([STEP, [[-0.5], [1]]], 0, "step 1, rank 0, micro-batch 0: -0.5 s; wanted: a finite"),
        ([STEP, [[0.1]]], 0, "step 1 has 1 ranks, step 0 has 2"),
        ([[[0, 0]]], 0, "all times are 0 s"),
        ([STEP], -1, "communication_seconds: -1 s"),
        ([STEP], float("nan"), "communication_seconds: nan s"),
        ([STEP], "2 s", "communication_seconds: the text '2 s'; wanted: a number"),
        ([STEP], None, "communication_seconds: null"),
    ],
)
def test_times_that_cannot_be_are_refused(
    steps: Any,
    communication: Any,
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused(write(tmp_path, steps, communication), complaint, capsys)


def refused(path: Path, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    for extra in ([], ["--json", "--workers", "8"]):
        assert cli.main(["plan-threshold", str(path), *extra]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("lossycoll plan-threshold: ")
        assert str(path) in err
        assert complaint in err
        assert err.count("\n") == 1


def test_files_that_cannot_be_read_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(tmp_path / "none.json", "No such file", capsys)
    refused(tmp_path, "Is a directory", capsys)
    for picture, complaint in (
        (tmp_path / "no-folder" / "out.png", "cannot write to"),
        (tmp_path / "out.jpg", "not a .png"),
    ):
        assert cli.main(["plan-threshold", str(EXAMPLE), "--picture", str(picture)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert complaint in err
