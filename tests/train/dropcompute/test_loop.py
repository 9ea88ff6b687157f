"""DropCompute in one process: what a loop hands out, how it may be left, and what is refused."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import lossycoll
from lossycoll.simulate import choose
from lossycoll.train.dropcompute.stopwatch import Stopwatch
from lossycoll.train.dropcompute.threshold import NANO, Threshold
from tests.support.dropcompute_cases import (
    Clock,
    Shuffled,
    check_close,
    dropping,
    endless,
    gradients,
    inputs_of,
    loss_of,
    oracle,
)

M = 4


def small() -> nn.Module:
    return nn.Linear(3, 2)


def work(drop: Any, model: nn.Module, seconds: float = 1.0) -> None:
    """A micro-batch that takes so long."""
    (model(torch.ones(1, 3)).sum() / drop.micro_batches).backward()
    drop.clock.now += seconds


# ---- what is handed out ----


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


@pytest.mark.parametrize("divisor", ["completed", "fixed"])
def test_the_mean_is_over_what_was_completed(divisor: str) -> None:
    model = Shuffled()
    drop = dropping(model, M, 2.5, divisor=divisor)
    for step in range(2):
        for x in drop(inputs_of(0, step, number) for number in range(M)):
            (loss_of(model, x) / M).backward()
            drop.clock.now += 1
        check_close(gradients(model), oracle(model, step, [3], M if divisor == "fixed" else None))
        model.zero_grad(set_to_none=step == 0)
    assert drop.report().last.factor == (1.0 if divisor == "fixed" else M / 3)


def test_what_ends_early_divides_by_what_there_was() -> None:
    model = Shuffled()
    drop = dropping(model, M, 99.0)
    for count in (2, 0):
        for x in drop(inputs_of(0, 0, number) for number in range(count)):
            (loss_of(model, x) / M).backward()
        if count:
            check_close(gradients(model), oracle(model, 0, [count]))
        model.zero_grad()
        assert drop.report().last.completed == count
    assert drop.report().dropped == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_list_has_what_was_dropped() -> None:
    model = small()
    drop = dropping(model, M, 1.5)
    out = []
    for _ in range(3):
        given = [f"{len(out)}{letter}" for letter in "abcd"]
        for batch in drop(given):
            out.append(batch)
            work(drop, model)
        model.zero_grad()
        assert drop.dropped == given[2:]
    assert out == ["0a", "0b", "2a", "2b", "4a", "4b"]


def test_what_was_dropped_of_a_list_comes_first_in_the_next_step() -> None:
    model = small()
    drop = dropping(model, M, 1.5, requeue=True)
    out, names = [], iter(range(100))
    for step in range(6):
        drop.clock.now += 50.0
        fresh = [next(names) for _ in range(drop.room)]
        for batch in drop(fresh):
            out.append(batch)
            work(drop, model, 1.0 if step < 4 else 0.1)
        model.zero_grad()
    assert out == list(range(len(out)))
    assert [drop.report().dropped, drop.dropped, drop.room] == [8, [], M]


def test_an_epoch_ends_when_nothing_is_left() -> None:
    model = small()
    drop = dropping(model, M, 2.5)
    loader = DataLoader(range(11), batch_size=1)
    for _ in range(2):
        sizes, seen = [], []
        for step in drop.steps(loader):
            batches = []
            for batch in step:
                batches.append(batch.item())
                work(drop, model)
            model.zero_grad()
            seen += batches
            sizes.append(len(batches))
        assert (sizes, seen) == ([3, 3, 3, 2], list(range(11)))


@pytest.mark.parametrize("listed", [False, True])
def test_a_micro_batch_that_is_given_up_comes_again(listed: bool) -> None:
    """In the middle of it the loop can be asked whether the rank is late."""
    model = small()
    drop = dropping(model, M, 1.5, requeue=listed)
    source, done, first = iter(range(100)), [], []
    for number in range(5):
        given = [next(source) for _ in range(drop.room)] if listed else source
        step = drop(given)
        for batch in step:
            first.append(len(done))
            drop.clock.now += 2.0 if number == 4 else 0.9
            if step.late:
                continue
            done.append(batch)
            work(drop, model, 0.0)
        model.zero_grad()
    # Two are begun in each step, of which the second one is late; the first never is.
    assert done == list(range(5))
    assert len(first) == 4 * 2 + 1
    report = drop.report()
    assert (report.completed, report.dropped, report.skipped) == (5, 5 * (M - 1), 0)
    assert report.seconds == pytest.approx(4 * 1.8 + 2)


class Recorded:
    """Random batches of two, an epoch of 24; keeps what it has yielded."""

    def __init__(self) -> None:
        self._inner = BatchSampler(RandomSampler(range(48)), batch_size=2, drop_last=False)
        self.yielded: list[tuple[int, ...]] = []

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._inner:
            self.yielded.append(tuple(batch))
            yield batch

    def __len__(self) -> int:
        return 24


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_gets_back_what_an_epoch_left(workers: int) -> None:
    """Also what the loader's workers had drawn ahead: every batch is done, once and in order."""
    model = small()
    drop = dropping(model, M, 2.5)
    inner = Recorded()
    loader = DataLoader(range(48), batch_sampler=drop.sampler(inner), num_workers=workers)
    done: list[tuple[int, ...]] = []
    for epoch in range(3):
        batches = iter(loader)
        left = 24 * epoch - len(done)
        assert len(loader) == 24 + left
        for _ in range(len(loader) // M):
            for batch in drop(batches):
                done.append(tuple(batch.tolist()))
                work(drop, model)
            model.zero_grad()
        del batches
        assert (left > 0) == (epoch > 0)
    assert done == inner.yielded[: len(done)]
    for epoch in range(2):
        whole = inner.yielded[24 * epoch : 24 * (epoch + 1)]
        assert sorted(index for batch in whole for index in batch) == list(range(48))
    assert len(done) > 48


# ---- a loop that is left in other ways ----


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

    def fail(start: Any) -> None:
        raise lossycoll.LinkError("rank 1 is out of reach")

    with monkeypatch.context() as patch:
        patch.setattr(drop._reduction, "reduce", fail)
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


def test_a_compiled_model_is_one_graph() -> None:
    model = Shuffled()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    drop = dropping(compiled, M, 2.5)
    for step in range(2):
        for x in drop(inputs_of(0, step, number) for number in range(M)):
            (loss_of(compiled, x) / M).backward()
            drop.clock.now += 1
        check_close(gradients(model), oracle(model, step, [3]))
        model.zero_grad()


# ---- the clock ----


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


def test_the_gpu_is_waited_for_before_the_clock_is_read() -> None:
    order: list[str] = []
    watch = Stopwatch(lambda: order.append("read") or 0.0, lambda: order.append("settled"))  # type: ignore[func-returns-value]
    watch.start()
    watch.lap()
    assert order == ["settled", "read"] * 2


# ---- the threshold ----

WARM_UP = 6


def machine(**rest: Any) -> Threshold:
    given = {"given": None, "drop_rate": None, "skip": 2, "warm_up": WARM_UP, "window": 4}
    return Threshold(M, **{**given, "tolerance": 0.25, **rest})


def warmed(tables: np.ndarray, rank: int, **rest: Any) -> Threshold:
    """One that has measured; ``tables``: ns [ranks, steps, M + 1]."""
    threshold = machine(**rest)
    for step in range(2 + WARM_UP):
        threshold.began(None if step == 0 else 9.0)
        assert not threshold.due
        row = tables[rank, max(0, step - 2), :M] / NANO
        threshold.note([lap for lap in row if lap > 0])
    threshold.began(9.0)
    assert threshold.due
    assert threshold.settle(tables, rank)
    return threshold


def made(seed: int = 0, ranks: int = 3) -> np.ndarray:
    """Exponential times above 1 s, and steps of the slowest and 0.5 s."""
    draws = np.random.default_rng(seed)
    times = 1 + draws.exponential(0.7, (ranks, WARM_UP, M))
    walls = times.sum(axis=2).max(axis=0) + 0.5
    table = np.concatenate([times, np.broadcast_to(walls[:, None], (ranks, WARM_UP, 1))], axis=2)
    return (table * NANO).astype(np.int64)


def test_all_ranks_take_the_threshold_that_is_chosen_from_all_times() -> None:
    tables = made()
    times = tables[:, :, :M].transpose(1, 0, 2) / NANO
    wanted = choose(times, 0.5, cut="started")
    assert wanted.speedup > 1.01
    found = [warmed(tables, rank) for rank in range(3)]
    for threshold in found:
        assert threshold.seconds == found[0].seconds == pytest.approx(wanted.threshold, rel=1e-6)
        assert threshold.choice.drop_rate == pytest.approx(wanted.drop_rate)
        assert threshold.phase == 0
        assert not threshold.due
    rate = warmed(tables, 1, drop_rate=0.1)
    asked = choose(times, 0.5, drop_rate=0.1, cut="started")
    assert rate.seconds == pytest.approx(asked.threshold, rel=1e-6)
    left = choose(times, 0.5, cut="threshold").threshold
    assert left != pytest.approx(wanted.threshold, rel=1e-3)
    assert warmed(tables, 2, cut="threshold").seconds == pytest.approx(left, rel=1e-6)


def test_the_table_is_what_was_measured() -> None:
    threshold = machine(skip=0, warm_up=3)
    for laps in ([1.0, 2.0], [], [0.0, 1.0, 1.0, 1.0]):
        threshold.began(5.0)
        threshold.note(laps)
    threshold.began(None)
    table = threshold.table()
    assert table.tolist() == [
        [NANO, 2 * NANO, 0, 0, 5 * NANO],
        [0, 0, 0, 0, 5 * NANO],
        [1, NANO, NANO, NANO, 0],
    ]
    assert threshold.settle(table[None], 0)


def test_a_lost_rank_has_no_say_and_an_empty_warm_up_is_repeated() -> None:
    tables = made()
    tables[1] = 0
    left = warmed(np.delete(tables, 1, axis=0), 0)
    assert warmed(tables, 0).seconds == left.seconds
    threshold = machine(skip=0)
    for _ in range(WARM_UP):
        threshold.note([])
    assert not threshold.settle(np.zeros((2, WARM_UP, M + 1), np.int64), 0)
    assert (threshold.phase, threshold.seconds) == (WARM_UP, math.inf)


def test_a_slow_step_in_the_warm_up_changes_little() -> None:
    tables = made()
    usual = warmed(tables, 0)
    tables[2, 3, 1] = 600 * NANO
    assert warmed(tables, 0).seconds == pytest.approx(usual.seconds, rel=0.1)
    assert warmed(tables, 0).choice.left_out == (3,)


@pytest.mark.parametrize("factor", [0.6, 1.6])
def test_it_is_measured_anew_when_micro_batches_take_another_time(factor: float) -> None:
    tables = made()
    threshold = warmed(tables, 0)
    rows = [row[:M] / NANO for row in tables[0]]

    def cut(laps: np.ndarray) -> list[float]:
        begun = np.concatenate([[0.0], np.cumsum(laps)[:-1]])
        return [float(lap) for lap, at in zip(laps, begun, strict=True) if at <= threshold.seconds]

    for row in rows * 2:
        threshold.note(cut(row))
        assert not threshold.stale
    for _ in range(4):
        threshold.note(cut(rows[0] * factor))
    assert threshold.stale
    threshold.restart()
    assert (threshold.phase, threshold.seconds, threshold.stale) == (WARM_UP, math.inf, False)
    threshold.ask()
    assert not threshold.stale  # it is being measured already


def test_it_is_measured_anew_when_somebody_asks() -> None:
    threshold = warmed(made(), 0)
    assert not threshold.stale
    threshold.ask()
    assert threshold.stale
    given = machine(given=2.0)
    given.ask()
    given.note([1.0])
    assert (given.stale, given.due, given.seconds) == (False, False, 2.0)


def test_auto_in_one_process() -> None:
    """Measured, used, and measured anew when the machine has become slower."""
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


# ---- what is refused ----


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"micro_batches": 0}, "micro_batches is 0, wanted a whole number, at least 1"),
        ({"micro_batches": 2.0}, "micro_batches is 2.0"),
        ({"micro_batches": True}, "micro_batches is True"),
        ({"threshold": 0}, "threshold is 0, wanted seconds above 0, or 'auto'"),
        ({"threshold": -1.0}, "threshold is -1.0"),
        ({"threshold": math.nan}, "threshold is nan"),
        ({"threshold": "fast"}, "threshold is 'fast'"),
        ({"threshold": None}, "threshold is None"),
        ({"threshold": True}, "threshold is True"),
        ({"drop_rate": 1.0}, "drop_rate is 1.0, wanted a share"),
        ({"drop_rate": math.nan}, "drop_rate is nan"),
        ({"drop_rate": -0.1}, "drop_rate is -0.1"),
        ({"threshold": 1.0, "drop_rate": 0.1}, "wanted one of them"),
        ({"divisor": "median"}, "divisor is 'median'"),
        ({"warm_up": 1}, "warm_up is 1, wanted a whole number, at least 2"),
        ({"skip": -1}, "skip is -1"),
        ({"window": 0}, "window is 0"),
        ({"cut": "deep"}, "cut is 'deep', wanted one of finished, threshold, started"),
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"tolerance": math.nan}, "tolerance is nan"),
    ],
)
def test_arguments_that_can_not_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(lossycoll.OptionError, match=said):
        lossycoll.DropCompute(small(), **{"micro_batches": M, **given})


def test_models_of_which_it_can_not_be_done_are_refused() -> None:
    optimizer = torch.optim.SGD(small().parameters(), lr=1.0)
    for model, said in (
        (optimizer, "was given a SGD; wanted: a module"),
        (nn.Sequential(small(), nn.SyncBatchNorm(2)), "1 is a SyncBatchNorm"),
    ):
        with pytest.raises(lossycoll.UnsupportedError, match=said):
            lossycoll.DropCompute(model, M)  # type: ignore[arg-type]


def test_a_loader_is_not_an_iterator() -> None:
    drop = dropping(small(), M, 1.0)
    with pytest.raises(lossycoll.OptionError, match=r"pass iter\(loader\)"):
        drop(DataLoader(range(9)))
