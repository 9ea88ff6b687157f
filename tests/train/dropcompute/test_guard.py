"""Gradients that are not averaged yet are not used."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import lossycoll
from tests.support.dropcompute_cases import dropping, endless, small, work

M = 4


def test_an_optimizer_can_not_step_within_the_loop() -> None:
    model, other = small(), small()
    drop = dropping(model, M, 99.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    free = torch.optim.SGD(other.parameters(), lr=1.0)
    before = model.weight.clone()
    for _ in drop(endless()):
        work(drop, model)
        free.step()  # somebody else's
        with pytest.raises(lossycoll.TrainingError, match=r"isn't over.*after it"):
            optimizer.step()
    assert torch.equal(model.weight, before)
    optimizer.step()
    assert not torch.equal(model.weight, before)
    model.zero_grad()
    held = iter(drop(endless()))
    next(held)
    with pytest.raises(lossycoll.TrainingError, match="still holds its iterator"):
        drop(endless())
    del held
    for _ in drop(endless()):
        work(drop, model)


def test_a_failure_that_nobody_could_catch_is_raised_later(monkeypatch: Any) -> None:
    model = small()
    drop = dropping(model, M, 99.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def fail(submit: Any) -> None:
        raise lossycoll.LinkError("rank 1 is out of reach")

    with monkeypatch.context() as patch:
        patch.setattr(drop._runner._averaging, "average", fail)
        for _ in drop(endless()):
            work(drop, model)
            break
        with pytest.raises(lossycoll.TrainingError, match="rank 1 is out of reach"):
            optimizer.step()
        model.zero_grad()
        with pytest.raises(lossycoll.LinkError):
            list(drop([]))
    optimizer.step()


def test_gradients_of_the_step_before_are_refused() -> None:
    model = small()
    drop = dropping(model, M, 99.0)
    for _ in drop(endless()):
        work(drop, model)
    with pytest.raises(lossycoll.TrainingError, match="zero_grad"):
        drop(endless())
    model.zero_grad(set_to_none=False)
    for _ in drop(endless()):
        work(drop, model)
    fixed = dropping(model, M, 99.0, divisor="fixed")
    for _ in fixed(endless()):
        work(fixed, model)


def test_it_leaves_nothing_behind() -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = len(hooks)
    model = small()
    drop = dropping(model, M, 99.0)
    for _ in drop(endless()):
        work(drop, model)
    assert len(hooks) == before + 1
    del drop
    gc.collect()
    assert len(hooks) == before
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def test_a_refused_loop_keeps_what_comes_again() -> None:
    model = small()
    drop = dropping(model, M, 1.5, requeue=True)
    for _ in drop(list(range(M))):
        work(drop, model)
    with pytest.raises(lossycoll.TrainingError, match="zero_grad"):
        drop([])
    assert drop.dropped == [2, 3]
