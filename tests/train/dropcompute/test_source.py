"""What a step leaves comes again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import lossycoll
from tests.support.dropcompute_cases import dropping, small, work

M = 4


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


def test_a_loader_is_not_an_iterator() -> None:
    drop = dropping(small(), M, 1.0)
    with pytest.raises(lossycoll.OptionError, match=r"pass iter\(loader\)"):
        drop(DataLoader(range(9)))


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
