"""The demo, small: real ranks, all five runs, figures that agree with each other."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lossycoll.cli.demo import corpus as demo_data
from lossycoll.cli.demo import report as demo_report
from lossycoll.cli.demo import worker as demo_train
from lossycoll.cli.demo.methods import PERIOD
from lossycoll.cli.launcher import Interrupted, LaunchError, launch, run_ranks, scratch
from tests.support.command_line import run_lossycoll
from tests.support.harness import warm_python
from tests.support.waiting import until

SMALL = ["--ranks", "2", "--layers", "1", "--width", "32", "--context", "32", "--batch", "2"]


def test_two_runs(tmp_path: Path) -> None:
    chosen = ("--runs", "gloo,lossy", "--steps", "4", "--loss", "0.3", "--out", str(tmp_path))
    done = run_lossycoll("demo", *SMALL, *chosen, "--json", python=warm_python())
    assert done.returncode == 0, done.stderr
    gloo, lossy = (json.loads(done.stdout)["runs"][name] for name in ("gloo", "lossy"))
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert lossy["curves"]["train"][0] == pytest.approx(gloo["curves"]["train"][0], rel=1e-6)
    assert len(lossy["curves"]["train"]) == 4
    assert gloo["drift"]["mean_square_distance"] == 0 < lossy["drift"]["mean_square_distance"]
    assert lossy["traffic"]["packets_missing"] > 0


@pytest.mark.long
def test_all_runs(tmp_path: Path) -> None:
    chosen = ("--steps", "12", "--loss", "0.3", "--out", str(tmp_path))
    done = run_lossycoll("demo", *SMALL, *chosen, "--json", python=warm_python())
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert json.loads((tmp_path / "demo.json").read_text()) == results
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")

    gloo, clean, lossy, bounded, sharded = (
        results["runs"][name] for name in ("gloo", "clean", "lossy", "bounded", "sharded")
    )
    for run in results["runs"].values():
        assert len(run["curves"]["train"]) == 12
        assert run["curves"]["validation"][0][0] == 0
        assert run["curves"]["validation"][-1][0] == run["curves"]["drift"][-1][0] == 12
        assert run["perplexity"] == pytest.approx(math.exp(run["validation_loss"]))
        assert 0 < run["step_ms_p50"] <= run["step_ms_p99"]
        # It has begun to learn: the first guess is no better than one of 256 bytes.
        assert run["validation_loss"] < run["curves"]["validation"][0][1]

    # The same seed: until the first packet is lost, the runs with DDP are the same run.
    assert clean["curves"]["train"] == pytest.approx(gloo["curves"]["train"], rel=1e-3)
    assert lossy["curves"]["train"][0] == pytest.approx(gloo["curves"]["train"][0], rel=1e-6)
    assert gloo["traffic"] is None
    assert clean["traffic"]["packets_sent"] > 0
    assert clean["traffic"]["packets_injected"] == clean["traffic"]["packets_missing"] == 0
    assert lossy["traffic"]["packets_missing"] > 0
    injected = lossy["traffic"]["packets_injected"] / lossy["traffic"]["packets_sent"]
    assert 0.15 < injected < 0.45
    assert gloo["drift"]["mean_square_distance"] == clean["drift"]["mean_square_distance"] == 0
    assert lossy["drift"]["mean_square_distance"] > bounded["drift"]["mean_square_distance"] > 0
    for run in (bounded, sharded):
        assert run["traffic"]["packets_injected"] > 0
        # How near these come to one another, cli/demo/test_drift_theory.py asks.
        curve = [figures for step, figures in run["curves"]["drift"] if step > 6]
        assert run["drift"]["measurements"] == len(curve) == 2
        for figure in ("mean_square_distance", "expected"):
            mean = sum(figures[figure] for figures in curve) / 2
            assert run["drift"][figure] == pytest.approx(mean)
        assert run["drift"]["expected"] > 0
    assert gloo["drift"]["expected"] == clean["drift"]["expected"] == 0
    assert lossy["drift"]["expected"] is None  # nothing bounds it
    change = 100 * (lossy["perplexity"] / gloo["perplexity"] - 1)
    assert lossy["perplexity_change_percent"] == pytest.approx(change)


@pytest.mark.long
def test_ctrl_c_ends_every_rank(tmp_path: Path) -> None:
    given = ["--runs", "gloo", "--steps", "1000000", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "lossycoll.cli", "demo", *SMALL, *given]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        events = tmp_path / "gloo" / "events.jsonl"
        until(
            lambda: process.poll() is not None or (events.exists() and events.stat().st_size),
            "a step",
            seconds=90,
        )
        assert process.poll() is None, process.stderr.read()
        assert len(ranks_of(tmp_path)) == 2
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"stopped" in errors
    assert ranks_of(tmp_path) == []


def ranks_of(folder: Path) -> list[int]:
    """Ranks that were started with the configuration in ``folder``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = entry.read_bytes().split(b"\0")
        except OSError:
            continue  # ended in the meantime
        if str(folder / "gloo" / "config.json").encode() in arguments:
            found.append(int(entry.parent.name))
    return found


def test_scratch_stays_for_a_rank_that_failed_only(tmp_path: Path) -> None:
    kept: list[Path] = []

    def work(error: type[Exception] | None) -> None:
        with scratch(str(tmp_path / "scratch-")) as folder:
            kept.append(folder)
            if error is not None:
                raise error("for the test")

    work(None)
    for error in (LaunchError, Interrupted, KeyError):
        with pytest.raises(error):
            work(error)
    assert [folder.exists() for folder in kept] == [False, True, False, False]


def test_failing_rank_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"exit code 1(.|\n)*steps"):
        launch(
            "lossycoll.cli.demo.worker",
            {"backend": "gloo"},  # and nothing else that the ranks need
            ranks=2,
            folder=tmp_path,
            environment={"LOSSYCOLL_TEST_ONLY": None},
        )


def test_logs_of_an_earlier_run_are_not_quoted(tmp_path: Path) -> None:
    """The demo's folder is the same each time."""
    errors = []
    for name in ("earlier", "later"):
        command = [sys.executable, "-c", f"raise SystemExit('the {name} one')"]
        with pytest.raises(LaunchError) as error:
            run_ranks(command, ranks=1, folder=tmp_path, environment={})
        errors.append(str(error.value))
    assert "the earlier one" in errors[0]
    assert "the later one" in errors[1]
    assert "the earlier one" not in errors[1]


def test_corpus_is_split_by_file(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"m{number}.py").write_bytes(bytes([33 + number]) * 10_000)
    for skipped in ("site-packages", "test"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "x.py").write_bytes(b"\x7f" * 10_000)
    corpus = demo_data.load(3, tmp_path)
    assert (corpus.train_files, corpus.validation_files) == (36, 4)
    train, held_out = set(corpus.train.tolist()), set(corpus.validation.tolist())
    assert not train & held_out
    assert train | held_out == set(range(33, 73))
    again = demo_data.load(3, tmp_path)
    assert torch.equal(corpus.validation, again.validation)
    assert not torch.equal(corpus.validation, demo_data.load(4, tmp_path).validation)


def test_too_little_text(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text("pass\n")
    with pytest.raises(demo_data.CorpusError, match="install"):
        demo_data.load(0, tmp_path)


def test_targets_are_the_next_bytes() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    inputs, targets = demo_data.draw(text, 5, 16, torch.Generator().manual_seed(0))
    assert inputs.shape == targets.shape == (5, 16)
    assert torch.equal(inputs + 1, targets)


def test_percentile() -> None:
    values = [float(value) for value in range(1, 101)]
    assert demo_report.percentile(values, 0.5) == 50
    assert demo_report.percentile(values, 0.99) == 99
    assert demo_report.percentile([4.0], 0.99) == 4


def test_recovery_of_the_second_half() -> None:
    curve = [
        (step, {"mean_square_distance": float(step), "relative_rms": step**0.5, "expected": 2.0})
        for step in range(1, 9)
    ]
    found = demo_report.mean_drift(curve, 8)
    assert found["measurements"] == 4
    assert found["mean_square_distance"] == pytest.approx(6.5)
    assert found["relative_rms"] == pytest.approx(6.5**0.5)
    assert found["expected"] == 2
    curve[-1][1]["expected"] = None
    assert demo_report.mean_drift(curve, 8)["expected"] is None


def test_points_of_the_picture() -> None:
    curve = [(step, {"far": float(step > 8)}) for step in range(1, 17)]
    points = demo_report.means(curve, "far")
    assert points == [(9.5, 1.0), (11.5, 1.0), (13.5, 1.0), (15.5, 1.0)]  # no zeros on a log axis


def test_drift_is_measured_at_all_parts_of_a_sweep() -> None:
    steps = demo_train.compared_steps(200)
    assert {1, 2, 3, 9, 100} & steps == {9}
    late = [step for step in steps if step > 100]
    assert len(late) == 34
    assert max(late) == 200
    assert {step % PERIOD for step in late} == set(range(PERIOD))


def test_learning_rate_rises_and_falls() -> None:
    rates = [demo_train.learning_rate(step, 100) for step in range(100)]
    assert max(rates) == pytest.approx(demo_train.LEARNING_RATE)
    assert rates[0] < rates[5] < rates[9]
    assert rates[20] > rates[60] > rates[99] > 0
