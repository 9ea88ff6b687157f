"""The sampler that gets back what an epoch left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from tests.support.dropcompute_cases import dropping, small, work

M = 4


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
