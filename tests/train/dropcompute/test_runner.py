"""A threshold over many steps of one process: measured, used, measured again."""

from __future__ import annotations

import gc
import logging
import math
from typing import Any

import pytest
import torch

import lossycoll
from tests.support.dropcompute_cases import dropping, endless, small, work

M = 4


def test_auto_in_one_process() -> None:
    """Measured, used, and measured again when the machine has become slower."""
    model = small()
    drop = dropping(model, M, drop_rate=0.25, skip=1, warm_up=4, window=3)
    pattern = (1.0, 1.0, 1.0, 3.0)
    source, seen = endless(), []
    scale = 1.0
    for step in range(24):
        for number, _ in enumerate(drop(source)):
            work(drop, model, scale * pattern[(number + step) % M])
        model.zero_grad()
        drop.clock.now += 0.25
        seen.append((drop.threshold, drop.report().last.completed))
        if step == 9:
            scale = 2.0
    before = seen[8][0]
    assert [threshold for threshold, _ in seen[:5]] == [math.inf] * 5
    assert math.isfinite(before)
    assert drop.report().choices == 2
    after = seen[-1][0]
    assert after == pytest.approx(2 * before)
    middle = [threshold for threshold, _ in seen[10:20]]
    assert math.inf in middle
    assert drop.choice.drop_rate <= 0.25
    assert drop.report().dropped > 0


def test_nothing_is_dropped_where_that_does_not_pay() -> None:
    model = small()
    drop = dropping(model, M, skip=0, warm_up=3)
    for _ in range(6):
        for _ in drop(endless()):
            work(drop, model)
        model.zero_grad()
    assert (drop.threshold, drop.report().dropped, drop.choice.speedup) == (math.inf, 0, 1.0)


def test_a_threshold_below_one_micro_batch_is_warned_of(caplog: Any) -> None:
    model = small()
    drop = dropping(model, M, 0.5)
    with caplog.at_level(logging.WARNING, "lossycoll"):
        for _ in range(5):
            for _ in drop(endless()):
                work(drop, model, 2.0)
            model.zero_grad()
    assert drop.report().completed == 5
    (said,) = [record.getMessage() for record in caplog.records]
    assert "takes 2 s, longer than the threshold of 0.5 s" in said
    assert "the only one of 4" in said


def test_a_jump_costs_one_step_at_most() -> None:
    model = small()
    drop = dropping(model, M, 3.5)
    counts = []
    for step in range(4):
        for number in drop(iter(range(100))):
            work(drop, model, {1: -500.0, 2: 86_400.0}.get(step, 1.0) if number == 1 else 1.0)
        counts.append(drop.report().last.completed)
        model.zero_grad()
    # A jump back is 0 s; one on may as well have been true.
    assert counts == [4, 4, 2, 4]
    assert drop.report().clock_jumps == 1
    assert drop.report().saved == 2.0  # by the median, not by a day


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
        patch.setattr(drop._averaging, "average", fail)
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
