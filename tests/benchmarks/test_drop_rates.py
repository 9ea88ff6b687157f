"""The study of drop rates: what is dropped, what is averaged, and what its report compares."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from torch import nn

import lossycoll
from benchmarks.common.results import Result
from benchmarks.studies.drop_rates import study
from benchmarks.studies.drop_rates.study import COMPLETED, FIXED, LOCAL, SWARM, Run


def test_gradients_are_those_of_dropcompute() -> None:
    """Of one rank that ends after 5 of 8 micro-batches, by both divisors."""
    torch.manual_seed(3)
    model = nn.Linear(6, 4)
    inputs, targets = torch.randn(16, 6), torch.randint(4, (16,))
    there = torch.arange(8) < 5
    study.mean_loss(model, inputs, targets, there).backward()  # type: ignore[no-untyped-call]
    ours = model.weight.grad
    assert ours is not None
    for divisor, scale in ((COMPLETED, 1.0), (FIXED, 5 / 8)):
        model.zero_grad()
        drop = lossycoll.DropCompute(model, 8, float("inf"), divisor=divisor)
        batches = iter(zip(inputs.chunk(8), targets.chunk(8), strict=True))
        for number, (some, wanted) in enumerate(drop(batches)):
            loss = study.cross_entropy(model(some), wanted) / 8
            loss.backward()  # type: ignore[no-untyped-call]
            if number == 4:
                break
        assert model.weight.grad is not None
        torch.testing.assert_close(model.weight.grad, scale * ours)


@pytest.mark.parametrize("rate", study.RATES[1:])
def test_a_threshold_drops_its_share_and_never_the_first(rate: float) -> None:
    import numpy as np

    seconds = study.Delayed().draw(np.random.default_rng(5), (4000, study.MICRO_BATCHES))
    there = study.completed(seconds, study.threshold_of(rate))
    assert 1 - there.mean() == pytest.approx(rate, abs=0.004)
    assert there[:, 0].all()
    assert study.completed(seconds, study.threshold_of(0.0)).all()


def test_runs_are_compared_with_those_of_their_seed() -> None:
    planned = list(study.runs(["digits"]))
    assert len(set(planned)) == len(planned) == 24 * 18
    run = Run("digits", COMPLETED, 0.1, 1)
    assert run.base == Run("digits", COMPLETED, 0.0, 1) in planned
    assert Run("digits", SWARM, 0.1, 1).base == Run("digits", LOCAL, 0.0, 1) in planned
    figures = {"loss": 0.2, "accuracy": 0.9, "dropped": 0.1}
    results = [
        Result(replace(run, seed=seed, **how).settings, {**figures, "loss": loss})
        for seed in (1, 2)
        for how, loss in (
            ({"rate": 0.0}, 0.2),
            ({}, 0.2 + 0.1 * (seed - 1)),
            ({"divisor": FIXED}, 0.3),
        )
    ]
    line = study.table(results).splitlines()[2]
    assert line.startswith("| digits | 2 | 10.0% | +5.26 ± 66.82 | **+10.52 ± 0.00** |")


def test_a_short_training_drops_what_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    task = study.TASKS["digits"]
    monkeypatch.setattr(study, "TASKS", {"digits": lambda: task(8)})
    whole = study.train(Run("digits", COMPLETED, 0.0, 1), Namespace())
    fewer = study.train(Run("digits", COMPLETED, 0.2, 1), Namespace())
    assert whole["dropped"] == 0 < fewer["dropped"]
    assert whole["loss"] != fewer["loss"]


def test_a_mean_after_local_steps_is_by_samples_or_equal() -> None:
    task = study.TASKS["digits"](8)
    for by_samples, wanted in ((True, 2.5), (False, 2.0)):
        replicas = [study.Replica(task, nn.Linear(1, 1)) for _ in range(2)]
        for replica, samples, value in zip(replicas, (1, 3), (1.0, 3.0), strict=True):
            replica.samples = samples
            torch.nn.init.constant_(replica.model.weight, value)
        study.average(replicas, by_samples)
        assert [one.model.weight.item() for one in replicas] == [wanted] * 2
        assert not any(one.samples for one in replicas)


def test_local_steps_without_drops_are_the_same_by_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    task = study.TASKS["digits"]
    monkeypatch.setattr(study, "TASKS", {"digits": lambda: task(10)})
    found = {
        (how, rate): study.train(Run("digits", how, rate, 1), Namespace())["loss"]
        for how in (COMPLETED, LOCAL, SWARM)
        for rate in (0.0, 0.2)
    }
    assert found[LOCAL, 0.0] == pytest.approx(found[SWARM, 0.0], rel=1e-5)
    assert len({round(loss, 7) for loss in found.values()}) == 5
