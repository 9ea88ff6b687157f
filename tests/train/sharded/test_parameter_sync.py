"""What ParameterSync makes of what comes, and when it says what is wrong. Without ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from lossycoll.errors import LinkError, PeerLostError
from lossycoll.train.common.layout import ParameterSpec, lay_out
from lossycoll.train.sharded.parameter_store import Shard
from lossycoll.train.sharded.parameter_sync import ParameterSync, UndeliveredShare

WORLD, BLOCKS, BUCKETS = 3, 4, 3


class Collectives:
    """Those of rank 0. ``comes[n]`` is what the wait for the n-th gather that starts does."""

    rank, world, lossy = 0, WORLD, None

    def __init__(self, encoding: str) -> None:
        self.comes: list[Callable[[], Any]] = []
        self.needed: list[Any] = []
        self.waited: list[int] = []
        self.closed: list[int] = []
        self.lost: tuple[int, ...] = ()
        self.encoding = encoding

    def __str__(self) -> str:
        return "rank 0/3"

    def blocks(self, nbytes: int, encoding: str) -> int:
        return BLOCKS

    @property
    def rounds_parameters(self) -> bool:
        return self.encoding != "same"

    def difference_encoding(self, flat: Any) -> str:
        return self.encoding

    def block_elements(self, flat: Any, encoding: str) -> int:
        return 128

    def all_gather_chunks(self, flat: Any, counts: Any) -> Any:
        return self.all_gather_blocks(flat, "whole", "same", counts)

    def agreed_lost(self) -> tuple[int, ...]:
        return self.lost

    def known_lost(self) -> tuple[int, ...]:
        return self.lost

    def peer(self, rank: int) -> str:
        return f"rank {rank} (there)"

    def all_gather_blocks(self, flat: Any, needed: Any, encoding: str, counts: Any) -> Any:
        number = len(self.needed)
        self.needed.append(needed)

        class Gather:
            def wait_result(_) -> Any:
                self.waited.append(number)
                return self.comes[number]()

            def wait(_) -> Any:
                self.closed.append(number)
                return self.comes[number]()

        return Gather()


def came(*missing: tuple[int, int]) -> Callable[[], Any]:
    """Every block but (owner, block) of ``missing``."""
    arrived = np.ones((WORLD, BLOCKS), bool)
    for place in missing:
        arrived[place] = False
    return lambda: arrived


def fails(error: BaseException) -> Callable[[], Any]:
    def wait() -> Any:
        raise error

    return wait


def made(
    max_age: int | None = 1, encoding: str = "same"
) -> tuple[Collectives, ParameterSync, list[Parameter]]:
    """BUCKETS buckets of one parameter each; the last parameter is in the first of them."""
    model = [Parameter(torch.zeros(60)) for _ in range(BUCKETS)]
    specs = [ParameterSpec(p.shape, p.stride(), 4, 0) for p in model]
    shards = [Shard(bucket, model, 0) for bucket in lay_out(specs, WORLD, 100)]
    collectives = Collectives(encoding)
    sync = ParameterSync(SimpleNamespace(collectives=collectives, model=model), max_age)  # type: ignore[arg-type]
    sync.add(shards)
    assert [sync.places[p] for p in model] == [2, 1, 0]
    return collectives, sync, model


def test_a_bucket_is_waited_for_alone_and_once() -> None:
    collectives, sync, model = made()
    collectives.comes = [came(), came((1, 0)), came()]
    before = [p._version for p in model]
    sync.begin()
    begun = [p._version for p in model]
    assert all(after > was for was, after in zip(before, begun, strict=True))
    sync.finish(sync.places[model[1]])
    sync.finish(sync.places[model[1]])
    # The first layers' bucket was sent first.
    assert collectives.waited == [1]
    # Autograd notices who has read the parameter since the step.
    assert [p._version - was for p, was in zip(model, begun, strict=True)] == [0, 1, 0]
    assert collectives.closed == []  # others may still ask for what this rank has sent
    sync.settle()
    assert collectives.waited == [1, 0, 2]
    assert sorted(collectives.closed) == [0, 1, 2]
    figures = sync.stats
    assert (figures.steps, figures.blocks, figures.stale) == (1, 3 * 2 * BLOCKS, 1)
    assert sync.ages() == (3 * 2 * BLOCKS - 1, 1)


@pytest.mark.parametrize("how", ["missing", "failed"])
def test_where_an_anchor_was_not_moved_alike_parameters_go_as_they_are(how: str) -> None:
    """With max_age=0 each step moves it."""
    collectives, sync, _ = made(0, "int8")
    worst = came((1, 0)) if how == "missing" else fails(PeerLostError("it was", peer=1))
    collectives.comes = [came(), worst, came(), *[came()] * 9]
    assert not sync.was_written()
    sync.begin()
    assert all(need[1:].all() and not need[0].any() for need in collectives.needed)
    if how == "missing":
        with pytest.raises(LinkError, match="are 1 steps old, wanted at most 0"):
            sync.settle()
    else:
        with pytest.raises(PeerLostError, match="it was"):
            sync.settle()
    assert sync.was_written()
    sync.begin(whole=True)
    sync.settle()
    assert collectives.needed[3:] == ["whole"] * 3
    assert not sync.was_written()
    sync.begin()
    sync.settle()
    assert not sync.was_written()


def test_a_wait_that_was_interrupted_is_made_again() -> None:
    collectives, sync, model = made(0, "int8")
    stopped = [fails(KeyboardInterrupt()), came(), fails(KeyboardInterrupt()), came()]

    def comes() -> Any:
        return stopped.pop(0)()

    collectives.comes = [comes, came(), came()]
    sync.begin()
    place = sync.places[model[0]]
    with pytest.raises(KeyboardInterrupt):
        sync.finish(place)
    sync.finish(place)
    with pytest.raises(KeyboardInterrupt):
        sync.close()
    sync.settle()
    assert not stopped
    assert not sync.was_written()


def test_weights_that_somebody_writes_to_are_noticed_once() -> None:
    collectives, sync, model = made(1, "int8")
    collectives.comes = [came()] * 9
    with torch.no_grad():
        model[0].fill_(3)
    assert sync.was_written()
    sync.settle_owed()
    sync.begin(whole=True)
    sync.settle()
    assert not sync.was_written()
    _, sync, model = made(1)
    with torch.no_grad():
        model[0].fill_(3)
    assert not sync.was_written(), "what travels as it is needs no anchor"


def test_what_is_due_is_asked_for_and_its_absence_is_raised_where_all_ranks_settle() -> None:
    collectives, sync, _ = made(max_age=1)
    collectives.comes = [came(), came((1, 0)), came(), came((2, 3)), came((1, 0)), came((1, 1))]
    sync.begin()
    sync.settle()
    sync.begin()
    first, second, third = collectives.needed[3:]
    assert first is None
    assert third is None
    assert np.argwhere(second).tolist() == [[1, 0]]
    sync.finish_all()  # says nothing
    assert sync.stats.repaired == 0
    with pytest.raises(LinkError, match=r"of rank 1 \(there\) are 2 steps old, wanted at most 1"):
        sync.settle()
    sync.settle()  # once


def test_a_lost_owner_is_named_before_the_link() -> None:
    collectives, sync, _ = made(max_age=0)
    collectives.comes = [came((1, 0)), came((2, 0)), came()]
    sync.begin()
    sync.finish(2)
    collectives.lost = (2,)
    with pytest.raises(PeerLostError, match=r"lost rank 2 .* its share of the optimizer's state"):
        sync.settle()


def test_the_first_failure_is_raised_after_all_were_waited_for() -> None:
    collectives, sync, model = made()
    lost = PeerLostError("gone", peer=1)
    collectives.comes = [came(), fails(lost), fails(ValueError("other"))]
    sync.begin()
    sync.finish(sync.places[model[1]])
    with pytest.raises(PeerLostError, match=r"gone\. A rank that is lost had the only copy"):
        sync.settle()
    assert sorted(collectives.waited) == [0, 1, 2]


FREE = np.ones((3, 200), bool)


def feed(share_of: UndeliveredShare, share: float, steps: int, free: Any = FREE) -> list[bool]:
    """``share`` of owner 1's 200 blocks are missing in each step; owner 2's all arrive."""
    for step in range(steps):
        arrived = np.ones((3, 200), bool)
        arrived[1] = (np.arange(200) * 37 + step) % 200 >= round(share * 200)
        share_of.note(free, arrived)
    found: list[bool] = share_of.owners().tolist()
    return found


def test_an_owner_is_found_when_too_many_blocks_that_were_not_needed_are_missing() -> None:
    undelivered = UndeliveredShare(rank=0, world=3)
    assert feed(undelivered, 0.5, 1) == [False, False, False]  # too little is known
    assert feed(undelivered, 0.5, 1) == [False, True, False]
    assert feed(UndeliveredShare(0, 3), 0.015, 100) == [False, False, False]
    assert feed(UndeliveredShare(0, 3), 0.03, 100) == [False, True, False]
    # Blocks that had to come say nothing: only what is free tells that the link is well again.
    nothing = np.zeros((3, 200), bool)
    assert feed(undelivered, 0.0, 1000, nothing) == [False, True, False]
    sample = nothing.copy()
    sample[1, ::16] = True
    assert feed(undelivered, 0.0, 500, sample) == [False, False, False]
    own = UndeliveredShare(rank=1, world=3)
    assert feed(own, 0.5, 10) == [False, False, False]
