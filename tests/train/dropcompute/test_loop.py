"""What a loop hands out, and how it may be left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lossycoll.train.dropcompute.loop import Stopwatch
from tests.support.dropcompute_cases import (
    Clock,
    Shuffled,
    check_close,
    dropping,
    gradients,
    inputs_of,
    loss_of,
    oracle,
    small,
    work,
)

M = 4


def test_a_loop_that_is_left_by_break_counts_what_was_done() -> None:
    model = Shuffled()
    drop = dropping(model, M, 99.0)
    xs = [inputs_of(0, 0, number) for number in range(M)]
    for number, x in enumerate(drop(xs)):
        if number == 2:
            break  # before its backward pass
        (loss_of(model, x) / M).backward()
    check_close(gradients(model), oracle(model, 0, [2]))
    assert (drop.report().completed, drop.report().skipped) == (2, 1)
    model.zero_grad()
    with drop(xs) as step:
        held = iter(step)  # nothing is freed by the break
        for x in held:
            (loss_of(model, x) / M).backward()
            break
    check_close(gradients(model), oracle(model, 0, [1]))
    assert drop.dropped == xs[1:]
    assert list(step) == []


def test_a_micro_batch_without_a_backward_pass_does_not_count() -> None:
    model = Shuffled()
    drop = dropping(model, M, 99.0)
    for number, x in enumerate(drop([inputs_of(0, 0, number) for number in (0, 9, 1, 9)])):
        if number % 2:
            continue  # of no use, somebody found
        (loss_of(model, x) / M).backward()
    check_close(gradients(model), oracle(model, 0, [2]))
    assert (drop.report().completed, drop.report().skipped) == (2, 2)


@pytest.mark.parametrize("context", [False, True])
def test_an_error_in_the_loop_is_the_users_own(context: bool) -> None:
    model = Shuffled()
    drop = dropping(model, M, 99.0)

    def step(wrong: bool) -> None:
        with drop(inputs_of(0, 0, number) for number in range(M)) as batches:
            _train(model, batches, wrong)

    def bare(wrong: bool) -> None:
        _train(model, drop(inputs_of(0, 0, number) for number in range(M)), wrong)

    run = step if context else bare
    with pytest.raises(ZeroDivisionError):
        run(True)
    check_close(gradients(model), oracle(model, 0, [1]))
    model.zero_grad()
    run(False)  # and goes on
    check_close(gradients(model), oracle(model, 0, [M]))
    assert drop.report().steps == 2

    def broken() -> Iterator[torch.Tensor]:
        yield inputs_of(0, 0, 0)
        raise OSError("the disk is gone")

    model.zero_grad()
    with pytest.raises(OSError, match="the disk is gone"):
        _train(model, drop(broken()), False)
    check_close(gradients(model), oracle(model, 0, [1]))


def _train(model: nn.Module, batches: Any, wrong: bool) -> None:
    for number, x in enumerate(batches):
        if wrong and number == 1:
            raise ZeroDivisionError
        (loss_of(model, x) / M).backward()


@pytest.mark.parametrize(
    ("threshold", "handed"),
    [(0.001, 1), (0.999, 1), (1.0, 2), (1.5, 2), (3.0, 4), (3.999, 4), (math.inf, 4)],
)
def test_no_micro_batch_begins_after_the_threshold(threshold: float, handed: int) -> None:
    """Each takes 1 s: the one that is under way ends, so a rank is late by one at most."""
    model = small()
    drop = dropping(model, M, threshold)
    source = iter(range(100))
    for step in range(3):
        out = []
        for number in drop(source):
            out.append(number)
            work(drop, model)
        # What isn't handed out isn't drawn either: the next step goes on with it.
        assert out == list(range(step * handed, (step + 1) * handed))
        model.zero_grad()
    report = drop.report()
    assert (report.steps, report.completed, report.dropped) == (3, 3 * handed, 3 * (M - handed))
    assert (report.seconds, report.saved) == (3.0 * handed, 3.0 * (M - handed))
    assert report.drop_rate == pytest.approx(1 - handed / M)
    assert report.last is not None
    assert report.last.factor == M / handed
    assert drop.gather_report()[0].completed == report.completed


def test_the_loading_of_data_counts() -> None:
    model = small()
    drop = dropping(model, M, 2.5)

    def slow() -> Iterator[int]:
        while True:
            drop.clock.now += 1
            yield 0

    for _ in drop(slow()):
        work(drop, model)
    assert drop.report().completed == 2


def test_a_clock_that_jumps() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    assert watch.start() is None
    clock.now += 2
    assert watch.lap() == 2
    clock.now -= 50
    assert (watch.lap(), watch.elapsed, watch.jumps) == (0, 2, 1)
    clock.now += 3
    assert (watch.lap(), watch.elapsed) == (3, 5)
    now, clock.now = clock.now, math.nan
    assert (watch.lap(), watch.jumps) == (0, 2)
    clock.now = now + 4
    assert watch.lap() == 4
    assert watch.start() is None  # it has gone back since the last start
    clock.now += 7
    assert watch.start() == 7
    clock.now -= 1000
    assert watch.start() is None
    clock.now = math.inf
    assert (watch.lap(), watch.elapsed, watch.jumps) == (0, 0, 3)


def test_the_gpu_is_waited_for_before_the_clock_is_read() -> None:
    order: list[str] = []
    watch = Stopwatch(lambda: order.append("read") or 0.0, lambda: order.append("synchronized"))  # type: ignore[func-returns-value]
    watch.start()
    watch.lap()
    assert order == ["synchronized", "read"] * 2
