"""The study of quality: which runs there are, its statistics, and that a run can be stopped."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import results as store
from benchmarks.common.results import Result
from benchmarks.common.runner import main, only
from benchmarks.studies.quality import report
from benchmarks.studies.quality import study as command
from benchmarks.studies.quality.matrix import (
    AGE_RULES,
    ALONE_KINDS,
    BASE,
    CONTROL,
    DIAL_GOALS,
    DIAL_TASKS,
    DISPERSED,
    FULL_SEEDS,
    GOALS,
    LOSSES,
    TRIED,
    WIRES,
    Run,
    batch_share,
    compared,
    dials,
    faults,
    method_names,
    runs,
    uneven,
)
from benchmarks.studies.quality.pool import Pool, RunFailed
from benchmarks.studies.quality.statistics import cells, estimate, perplexity_change
from benchmarks.studies.quality.tasks import TASKS
from benchmarks.studies.quality.variants import variants
from lossycoll.plan.faults import parse


def test_seeds_are_outermost_and_the_goals_come_first() -> None:
    found = list(runs((1, 2)))
    assert len({run.key for run in found}) == len(found)
    last = list(runs((FULL_SEEDS + 1,)))
    assert {run.variant for run in last} == {BASE, *method_names(), *DIAL_GOALS}
    assert {(run.kind, run.loss) for run in last if run.variant != BASE} == set(
        itertools.product(ALONE_KINDS, GOALS)
    )
    # Of each seed, parity alone has all its goals, and a base for each.
    for seeds in (found, last):
        alone = {run for run in seeds if run.variant in DIAL_GOALS and run.task in DIAL_TASKS}
        assert len(alone) == len(DIAL_GOALS) * 2 * 3 * 3 * 3 * len({run.seed for run in seeds})
        assert {run.base for run in alone} <= set(seeds)
    half = len(found) // 2
    assert {run.seed for run in found[:half]} == {1}
    assert [run.cell for run in found[:half]] == [run.cell for run in found[half:]]
    first = [run for run in found if run.task == "gpt" and run.variant == "sharded"][:3]
    assert [(run.world, run.kind, run.loss) for run in first] == [
        (4, "single", loss) for loss in (0.1, 0.2, 0.4)
    ]
    # The run that all of a seed are compared with comes before them.
    assert found.index(Run("gpt", 4, "none", 0.0, BASE, 1)) == 0
    for place, run in enumerate(found):
        assert run.variant == BASE or found.index(run.base) < place
    names = {BASE, *compared(), *TRIED, *AGE_RULES, *DISPERSED, *dials(), *WIRES}
    assert {run.variant for run in found} == names == set(variants())
    assert {run.task for run in found} == set(TASKS)


@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("loss", LOSSES)
def test_uneven_loss_is_the_same_on_average(world: int, loss: float) -> None:
    others, bad = uneven(loss, world)
    links = [(a, b) for a in range(world) for b in range(world) if a != b]
    asked = parse(faults(Run("gpt", world, "uneven", loss, "ddp", 1)))
    rates = [asked.loss_of(*link) for link in links]
    assert sum(rates) / len(rates) == pytest.approx(loss, abs=1e-5)
    assert sorted(set(rates)) == [others, bad]
    assert bad == pytest.approx(min(3 * loss, 0.9))
    assert asked.loss_of(0, 1) == asked.loss_of(1, 0) == bad


def test_faults_of_a_run() -> None:
    assert faults(Run("gpt", 4, "none", 0.0, "reliable", 3)) == ""
    assert faults(Run("gpt", 4, "single", 0.1, "ddp", 3)) == "loss=0.1,seed=3"
    assert faults(Run("gpt", 4, "bursty", 0.1, "ddp", 3)) == "loss=0.1,burst=8,seed=3"
    assert faults(Run("gpt", 4, "bursty5", 0.1, "ddp", 3)) == "loss=0.1,burst=5,seed=3"
    assert batch_share(Run("gpt", 4, "bursty", 0.4, "ddp", 3)) == 1
    control = Run("gpt", 4, "single", 0.4, CONTROL, 3)
    assert faults(control) == ""
    # The variance at 40% and 4 ranks, (1 - 0.4^4) / (1 - 0.4), is 1.624 times that of no loss.
    assert batch_share(control) == pytest.approx(1 / 1.624)


def test_only_takes_what_fits() -> None:
    every = list(runs((1, 2)))
    found = only(every, ["task=gpt", "loss=0.1,0.4", "variant=ddp", "kind=single", "world=4"])
    assert [run.key for run in found] == [
        f"gpt/4/single/{loss}/ddp/{seed}" for seed in (1, 2) for loss in (0.1, 0.4)
    ]
    with pytest.raises(ValueError, match=r"'lost=0.1': wanted NAME=VALUE"):
        only(every, ["lost=0.1"])
    with pytest.raises(ValueError, match=r"variant is one of ddp, ddp\+driftbound"):
        only(every, ["variant=drp"])


def test_estimates_are_students() -> None:
    # By hand: mean 2, standard deviation 1, t(0.975; 2 degrees) 4.302653, over sqrt(3).
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert (found.low, found.high) == (2 - found.half, 2 + found.half)
    # t(0.975; 1 degree) is 12.7062, the standard deviation sqrt(2).
    assert estimate([0.0, 2.0]).half == pytest.approx(12.7062, rel=1e-5)
    assert estimate([5.0]).half is None
    assert estimate([5.0]).high == math.inf


def entry(run: Run, loss: float) -> Result:
    """A result with what the reports read."""
    judged = {"loss": loss, "accuracy": 0.5}
    figures = {
        "models": {"rank0": judged, "average": judged, "replicas": judged},
        "drift": {"mean_square": 0.1, "relative": 0.01},
        "traffic": {"bytes_sent": 1000 if run.variant == BASE else 1150},
        "curve": [3.0, loss],
        "parameters": 7,
        "steps": 20,
    }
    return Result(run.settings, figures)


def example() -> dict[str, Result]:
    out = {}
    for seed, base, lossy in ((1, 1.0, 1.01), (2, 2.0, 2.03), (3, 3.0, 3.05), (4, 4.0, None)):
        reliable = Run("gpt", 4, "none", 0.0, BASE, seed)
        out[reliable.key] = entry(reliable, base)
        if lossy is not None:
            run = Run("gpt", 4, "single", 0.1, "sharded", seed)
            out[run.key] = entry(run, lossy)
    alone = Run("gpt", 8, "single", 0.1, "sharded", 1)
    return {**out, alone.key: entry(alone, 1.0)}


def test_differences_are_paired() -> None:
    found = cells(example(), perplexity_change())
    assert list(found) == [("gpt", 4, "single", 0.1, "sharded")]  # without its base a run is none
    (got,) = found.values()
    wanted = [100 * (math.exp(d) - 1) for d in (0.01, 0.03, 0.05)]
    assert got.n == 3
    assert got.mean == pytest.approx(sum(wanted) / 3)
    assert got.half == pytest.approx(estimate(wanted).half)


def test_cells_of_a_goal_are_taken_together_by_seed() -> None:
    entries = {}
    for seed, shifts in ((1, (0.01, 0.02, 0.03, 0.04)), (2, (0.03, 0.02, 0.01, 0.02))):
        places = [(world, kind) for world in (4, 8) for kind in ("single", "bursty")]
        for (world, kind), shift in zip(places, shifts, strict=True):
            run = Run("gpt", world, kind, 0.1, "sharded", seed)
            entries[run.key] = entry(run, 1.0 + shift)
            entries[run.base.key] = entry(run.base, 1.0)
    got = report.together(entries, "sharded", 0.1)
    assert got is not None
    assert got.n == 2
    wanted = [
        100 * sum(map(math.expm1, shifts)) / 4
        for shifts in ((0.01, 0.02, 0.03, 0.04), (0.03, 0.02, 0.01, 0.02))
    ]
    assert got.mean == pytest.approx(sum(wanted) / 2)
    del entries[Run("gpt", 8, "bursty", 0.1, "sharded", 2).key]
    got = report.together(entries, "sharded", 0.1)
    assert got is not None
    assert got.n == 1
    assert report.together(entries, "sharded", 0.2) is None


def test_every_variant_has_its_style() -> None:
    drawn = [variants()[name] for name in compared()]
    # Colours and markers tell variants apart, each by itself.
    assert len({one.colour for one in drawn}) == len({one.marker for one in drawn}) == len(drawn)


def test_reports_of_a_part_of_the_study(tmp_path: Path) -> None:
    page = (
        "Text.\n\n<!-- gpt-perplexity-4: begin -->\nold\n<!-- gpt-perplexity-4: end -->\n\nMore.\n"
    )
    places = "".join(
        f"<!-- {name}: begin --><!-- {name}: end -->\n" for name in ("goals", "traffic")
    )
    (tmp_path / "quality.md").write_text(page + places)
    report.write([*example().values()], tmp_path)
    text = (tmp_path / "quality.md").read_text()
    assert text.startswith("Text.\n\n<!-- gpt-perplexity-4: begin -->\n\n| loss | zero-fill |")
    assert "old" not in text
    row = "| 10% single | - | - | - | - | - | +3.06 ± 5.12% | - | +0.8%; +1.17% validation |"
    assert row in text
    assert "| sharded | 4 | 10% single | +0.4% | +3.06 ± 5.12% | missed on average, not" in text
    assert "| 10% single | - | - | - | +15% | - | - |" in text
    saved = json.loads((tmp_path / "quality.json").read_text())
    assert saved["runs"] == 8
    assert saved["cells"][0]["perplexity_change_percent"]["mean"] == pytest.approx(3.06, abs=0.01)
    assert (tmp_path / "quality-gpt.png").stat().st_size > 10_000
    report.write([], tmp_path)  # nothing has run yet
    assert "No runs yet." in (tmp_path / "quality.md").read_text()


class NoRanks:
    """Stands for the pool: what the command does with its answers needs no ranks."""

    def __init__(self, world: int, log: list[str], failing: str) -> None:
        self._log, self._failing = log, failing

    def run(self, run: Run, steps: int | None = None) -> dict[str, Any]:
        self._log.append(run.key)
        if run.variant == self._failing:
            raise RunFailed(f"{run.key}: rank 1 died")
        return dict(entry(run, 1.0).figures)

    def close(self) -> None:
        self._log.append("closed")


def test_the_study_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    base = Run("digits", 2, "none", 0.0, BASE, 1)
    first, second, third = (
        Run("digits", 2, "single", 0.2, variant, 1)
        for variant in ("ddp", "zero-fill", "own-gradient")
    )
    log: list[str] = []
    failing = ""
    monkeypatch.setattr(command, "runs", lambda seeds: [base, first, second, third])
    monkeypatch.setattr(command, "Pool", lambda world: NoRanks(world, log, failing))
    results = tmp_path / "results.jsonl"
    arguments = ["--results", str(results)]
    assert main(command.STUDY, [*arguments, "--limit-minutes", "1e-12"]) == 0
    assert not results.exists()
    assert main(command.STUDY, [*arguments, "--only", "variant=reliable,ddp"]) == 0
    assert log == [base.key, first.key, "closed"]
    with results.open("a") as lines:
        lines.write('{"key": "digits/2/no')  # as a crash leaves it
    before = store.load(results)
    log.clear()
    failing = second.variant
    assert (
        main(command.STUDY, arguments) == 1
    )  # a run that fails is reported, and tried again next time
    shown = capfd.readouterr().err
    assert "4 pieces, 2 to do" in shown
    assert f"{second.key}: rank 1 died" in shown
    failing = ""
    assert main(command.STUDY, arguments) == 0
    assert log == [second.key, third.key, "closed", second.key, "closed"]
    after = store.load(results)
    assert list(after) == [run.key for run in (base, first, third, second)]
    assert {key: after[key] for key in before} == before
    assert after[base.key].commit == store.commit("benchmarks/studies/quality")
    with pytest.raises(SystemExit, match="2"):
        main(command.STUDY, [*arguments, "--only", "variant=none"])
    assert "variant is one of" in capfd.readouterr().err


def test_runs_are_real() -> None:
    """Two ranks train with and without loss, in one pool; what they say is what happened."""
    base = Run("digits", 2, "none", 0.0, BASE, 1)
    lossy = [
        Run("digits", 2, "single", 0.2, "ddp", 1),
        Run("digits", 2, "bursty", 0.4, "zero-fill", 1),
    ]
    before = dict(os.environ)
    with Pool(2) as pool:
        assert dict(os.environ) == before  # who makes a pool goes on with what it had
        wanted = pool.run(base, 6)
        assert wanted["traffic"]["packets_missing"] == 0
        assert wanted["drift"]["mean_square"] == 0
        assert pool.run(base, 6)["models"] == wanted["models"]
        for run in lossy:
            found = pool.run(run, 6)
            sent, dropped = (found["traffic"][f"packets_{name}"] for name in ("sent", "injected"))
            assert run.loss / 2 < dropped / sent < 2 * run.loss
            assert found["drift"]["mean_square"] > 0
            assert found["models"]["rank0"]["loss"] != wanted["models"]["rank0"]["loss"]
            assert found["steps"] == 6
        with pytest.raises(RunFailed, match=r"rank \d failed"):
            pool.run(Run("no such task", 2, "single", 0.2, "ddp", 1), 6)


@pytest.mark.parametrize(
    "variant",
    [DIAL_GOALS[0], *(pytest.param(one, marks=pytest.mark.long) for one in DIAL_GOALS[1:])],
)
def test_the_dial_is_met_by_parity_alone(variant: str) -> None:
    """Once the loss has been seen."""
    with Pool(2) as pool:
        traffic = pool.run(Run("lstm", 2, "single", 0.2, variant, 1), 6)["traffic"]
    assert traffic["packets_injected"] > traffic["packets_sent"] / 10
    assert traffic["parity_sent"] > 0 < traffic["packets_recovered"]
    # DDP's new buckets, and what ranks agree on in a step.
    assert traffic["packets_resent"] == traffic["resent_reliable"]
