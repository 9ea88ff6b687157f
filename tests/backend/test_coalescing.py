"""The coalescing manager takes the works of its own thread, and no others."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import lossycoll
from lossycoll.backend.work import Coalescing, ManyWork
from tests.support.harness import EXACT, await_ranks, init, run_good


def work(name: float) -> ManyWork:
    return ManyWork([], [torch.tensor(name)])


def names(many: Any) -> list[float]:
    return [float(tensor) for tensor in many.result()]


def test_each_thread_by_itself() -> None:
    coalescing, seen = Coalescing(), []

    def elsewhere() -> None:
        coalescing.add(work(2))  # no manager is open here
        coalescing.begin()
        coalescing.add(work(3))
        seen.append(names(coalescing.end()))

    coalescing.begin()
    coalescing.add(work(1))
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    coalescing.add(work(4))
    assert names(coalescing.end()) == [1, 4]
    assert seen == [[3]]
    coalescing.add(work(5))
    assert names(coalescing.end()) == []


def rank_two_threads(rank: int, world: int) -> list[float]:
    """A receive of another thread is open while the manager is left: rank 1 sends only then."""
    init(timeout=20)
    peer, got = 1 - rank, torch.zeros(3)
    value = torch.full((5,), float(rank + 1))
    works: list[Any] = []
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.all_reduce(value)
        thread = threading.Thread(target=lambda: works.append(dist.irecv(got, peer, tag=7)))
        thread.start()
        thread.join()
    manager.wait()
    assert not works[0].is_completed()
    _get_default_store().set(f"waited/{rank}", "")
    await_ranks("waited", range(world))
    dist.send(torch.full((3,), float(rank)), peer, tag=7)
    works[0].wait()
    dist.destroy_process_group()
    return [*value.unique().tolist(), *got.unique().tolist()]


def test_a_receive_of_another_thread_is_not_waited_for() -> None:
    assert run_good(rank_two_threads, 2, {"LOSSYCOLL_LOG": "off", **EXACT}, timeout=60) == [
        [3.0, 1.0],
        [3.0, 0.0],
    ]


def rank_refused(rank: int, world: int) -> list[float]:
    """If one of several calls is refused, none is made."""
    init(timeout=20)
    group: Any = dist.group.WORLD
    good, whole = torch.ones(4), torch.ones(8)
    shared, rows = torch.ones(1).expand(3), [torch.zeros(4), torch.zeros(4)]
    for refused in (
        lambda: group.allreduce_coalesced([good, shared]),
        lambda: group.allreduce_coalesced([good.to_sparse().int().bool(), good]),
        lambda: group.reduce_scatter_single_coalesced([good, good], [whole]),
        lambda: group.reduce_scatter_single_coalesced([good, good], [whole, good]),
        lambda: group.all_gather_single_coalesced([whole, whole], [good]),
        lambda: group.all_gather_single_coalesced([whole, good], [good, good]),
        lambda: group.allgather_coalesced([[*rows], [rows[0]]], [good, good]),
    ):
        with pytest.raises(lossycoll.UnsupportedError):
            refused()
        assert group._health.seq == -1
        assert good.eq(1).all()
        assert whole.eq(1).all()
    group.allgather_coalesced([[rows[0]], [rows[1]]], [torch.full((4,), float(rank))]).wait()
    dist.destroy_process_group()
    return [row.mean().item() for row in rows]


def test_coalesced_calls_are_refused_before_any_is_made() -> None:
    env = {"LOSSYCOLL_LOG": "off", **EXACT}
    assert run_good(rank_refused, 2, env) == [[0.0, 1.0]] * 2
