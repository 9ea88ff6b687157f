"""on_peer_loss="continue": what some ranks know sooner than others, all of them decide alike."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import lossycoll
from lossycoll.backend.process_group import LossyProcessGroup
from lossycoll.train.common.collectives import Collectives
from lossycoll.train.compress import step
from tests.support import harness
from tests.support.harness import Ranks, await_ranks, kill_self
from tests.support.sharded_cases import batch, loss_of, network, sharded, share
from tests.support.waiting import until

ENV = {
    "LOSSYCOLL_ON_PEER_LOSS": "continue",
    "LOSSYCOLL_LIVENESS": "5",
    "LOSSYCOLL_LOG": "off",
}
WORLD = 3
LATE, AHEAD, VICTIM = range(WORLD)
PATIENCE = timedelta(seconds=30)


def left_of(ranks: Ranks, victim: int) -> list[Any]:
    outcomes = ranks.collect(100)
    assert outcomes[victim].code == -signal.SIGKILL, outcomes[victim]
    left = [outcome for outcome in outcomes if outcome.rank != victim]
    for outcome in left:
        assert outcome.code == 0, outcome
    return [outcome.value for outcome in left]


# ---- a rank that knows of a loss, while another has gone ahead ----


def until_lost() -> None:
    group = dist.group.WORLD
    until(lambda: group.lossy_lost() and lossycoll.stats().lost, "a lost rank", seconds=30)


def once_it(kind: type, name: str, then: Any) -> None:
    """Calls ``then`` after the next call of a method."""
    method = getattr(kind, name)

    def called(*args: Any) -> Any:
        out = method(*args)
        setattr(kind, name, method)
        then()
        return out

    setattr(kind, name, called)


def step_forever(rank: int) -> Any:
    """A step of a ShardedOptimizer in two halves, of which the second is that of interest."""
    model = network()
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1)

    def backward() -> None:
        mine.zero_grad()
        loss_of(model, share(batch(0, WORLD), rank)).backward()

    def second() -> None:
        mine.step()
        backward()

    backward()
    mine.step()
    backward()
    return second


def mean_forever(rank: int) -> Any:
    """ARC-Top-K's mean."""
    collectives = Collectives(None)
    flat = torch.full((30_000,), float(rank))
    step.mean(collectives, flat, feedback=True)
    return lambda: step.mean(collectives, flat, feedback=True)


ROUTES: dict[str, tuple[Any, type, str]] = {
    # What to do, and which call another has done before the late one hears of the loss.
    "step, sent": (step_forever, LossyProcessGroup, "all_gather_blocks"),
    "step, asked": (step_forever, Collectives, "agreed_lost"),
    "mean, sent": (mean_forever, LossyProcessGroup, "reduce_scatter_blocks"),
}


def one_is_ahead(rank: int, world: int) -> tuple[int | None, str]:
    harness.init(timeout=60)
    store = _get_default_store()
    route = os.environ["ROUTE"]
    prepare, kind, name = ROUTES[route]
    act = prepare(rank)
    dist.barrier()

    def ahead() -> None:
        store.set("ahead", "")
        if "asked" in route:
            until_lost()

    if rank == VICTIM:
        store.wait(["ahead"], PATIENCE)
        kill_self()
    if rank == AHEAD:
        once_it(kind, name, ahead)
    else:
        until_lost()

    def until_reported() -> None:
        for _ in range(5):
            act()

    with pytest.raises(lossycoll.PeerLostError) as caught:
        until_reported()
    # Nobody has left yet: that would end the others' waits.
    store.set(f"raised {rank}", "")
    store.wait([f"raised {other}" for other in (LATE, AHEAD)], PATIENCE)
    dist.destroy_process_group()
    return caught.value.peer, str(caught.value)


@pytest.mark.parametrize("route", ROUTES)
def test_all_raise_though_one_hears_of_the_loss_before_another_has_gone_ahead(route: str) -> None:
    with Ranks(one_is_ahead, WORLD, {**ENV, "ROUTE": route}) as ranks:
        reported = left_of(ranks, VICTIM)
    for peer, text in reported:
        assert peer == VICTIM
        assert "rank 2" in text


# ---- a call of several operations, the first of which a rank's death tears ----


def sparse_sums(rank: int, world: int) -> dict[str, Any]:
    """Rank 3's packets never reach rank 0."""
    harness.init(timeout=60)
    out: dict[str, Any] = {}
    store = _get_default_store()
    store.set(f"here/{rank}", "")

    def die_in_the_middle() -> None:
        await_ranks("counted", (1, 2))
        kill_self()

    def say_that_it_has_counted() -> None:
        until(lambda: lossycoll.stats().operations > before, "the first operation", seconds=60)
        store.set(f"counted/{rank}", "")

    before = lossycoll.stats().operations
    await_ranks("here", range(world))
    role = {1: say_that_it_has_counted, 2: say_that_it_has_counted, 3: die_in_the_middle}
    if rank in role:
        threading.Thread(target=role[rank], daemon=True).start()
    places = torch.tensor([[rank, 4]])
    for name in ("in flight", "after"):
        value = torch.sparse_coo_tensor(places, torch.ones(2), (6,))
        with pytest.raises(lossycoll.PeerLostError) as caught:
            dist.all_reduce(value)
        out[name] = caught.value.peer, str(caught.value)
    dense = torch.full((5,), rank)
    dist.all_reduce(dense)
    out["dense"] = dense.unique().tolist()
    dist.destroy_process_group()
    return out


def test_a_sparse_sum_that_is_partially_delivered_on_one_rank_fails_on_all() -> None:
    with Ranks(sparse_sums, 4, {**ENV, "LOSSYCOLL_INJECT": "link=3-0:1"}) as ranks:
        reported = left_of(ranks, 3)
    for got in reported:
        assert got["in flight"][0] == got["after"][0] == 3
        assert "so none has the sum" in got["in flight"][1]
        assert "needs data of rank 3" in got["after"][1]
        assert got["dense"] == [0 + 1 + 2]
