"""Calls that fail: the error has its type, no stream stays stuck, and tensors can be used after it.

``wait()`` orders a stream and doesn't block the host, so an error comes from it, from a future or
from a later call, whichever is first to know. Each check ends the group that it broke.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lossycoll
from tests.gpu.checks import Rank, Table
from tests.support.harness import init

TABLE = Table(init={"pg_options": {"lossy_min_bytes": 1 << 30}})


def _fails(call: Callable[[], Any], error: type[Exception], seconds: float = 10.0) -> Exception:
    """Calls until it raises ``error``; nothing else may be raised before that."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            call()
        except error as caught:
            return caught
        time.sleep(0.01)
    pytest.fail(f"no {error.__name__} within {seconds:g} s")


def _must_be_usable(rank: Rank, *touched: Tensor) -> None:
    """The device does everything that was queued; what the failed calls had can be read and
    written. Then the group ends."""
    rank.wait_for_device()
    for t in touched:
        t.cpu()
        t.fill_(2.0)
        assert t.sum().item() == 2 * t.numel()
    x = torch.eye(64, device=rank.device)
    assert torch.equal(x @ x, x)
    dist.destroy_process_group()
    rank.wait_for_device()


@TABLE.check()
def sizes_that_differ(rank: Rank) -> None:
    """Later calls name the reason; what was to be filled holds no half of a result."""
    t = rank.full(100_000 + rank.rank, 7.0)
    error = _fails(lambda: dist.all_reduce(t), lossycoll.MismatchError)
    for part in (f"rank {rank.rank}/{rank.world}", "float32[100000]", "float32[100001]"):
        assert part in str(error), error
    rank.wait_for_device()
    got = t.cpu()
    assert (got.isnan() | (got == 7.0)).all(), got[:8]
    _must_be_usable(rank, t)


@TABLE.check()
def splits_that_differ(rank: Rank) -> None:
    """Only the ranks that exchange know; what they say of it comes before the data."""
    whole, part = 100_000, 40_000
    sent = [whole, whole] if rank.rank == 0 else [part, 2 * whole - part]
    into = rank.full(sum(sent), 7.0)
    source = rank.full(2 * whole, 1.0)

    def call() -> None:
        dist.all_to_all_single(into, source, sent, sent)
        rank.wait_for_device()
        dist.all_reduce(rank.full(10, 1.0))

    error = _fails(call, lossycoll.MismatchError)
    assert "split sizes" in str(error), error
    _must_be_usable(rank, into, source)


@TABLE.check()
def what_is_sent_stays_when_a_broadcast_fails(rank: Rank) -> None:
    t = rank.full(100_000 + rank.rank, 7.0)
    _fails(lambda: dist.broadcast(t, 0), lossycoll.MismatchError)
    rank.wait_for_device()
    if rank.rank == 0:
        assert (t == 7.0).all(), t[:4]
    _must_be_usable(rank, t)


@TABLE.check()
def sizes_that_differ_by_a_future(rank: Rank) -> None:
    """Torch keeps the text of an error that a future raises; so do callbacks."""
    t = rank.full(200_000 + rank.rank, 7.0)
    future = dist.all_reduce(t, async_op=True).get_future()
    after = future.then(lambda done: done.value()[0] * 2)
    for one in (future, after):
        with pytest.raises(RuntimeError, match="MismatchError: "):
            one.wait()
    _must_be_usable(rank, t)


@TABLE.check()
def large_tensors_that_differ(rank: Rank) -> None:
    """Of several chunks, which the ranks divide alike until they differ."""
    t = rank.full(12_000_000 + 1_000_000 * rank.rank, 7.0)
    works = []

    def call() -> None:
        works.append(dist.all_reduce(t, async_op=True))
        works[-1].wait()

    _fails(call, lossycoll.MismatchError)
    _must_be_usable(rank, t)


@TABLE.check()
def a_rank_that_never_calls(rank: Rank) -> None:
    """The timeout of a call (the group's here) frees the stream that waits for it."""
    dist.destroy_process_group()
    init(timeout=2.0)
    store = dist.distributed_c10d._get_default_store()
    t = rank.full(50_000, 7.0)
    if rank.rank == 1:  # lives for as long as it is waited for
        store.wait(["rank 0 has its error"], timedelta(seconds=20))
    else:
        work = dist.all_reduce(t, async_op=True)

        def ask() -> None:
            work.wait()
            dist.all_reduce(rank.full(10, 1.0), async_op=True)

        _fails(ask, lossycoll.OperationTimeout)
        store.set("rank 0 has its error", "")
    _must_be_usable(rank, t)


@TABLE.check()
def an_abort_while_others_wait(rank: Rank) -> None:
    t = rank.full(2_000_000, 7.0)
    store = dist.distributed_c10d._get_default_store()
    if rank.rank == 0:
        store.wait(["1 waits"], timedelta(seconds=20))
        time.sleep(0.2)
        dist.distributed_c10d._abort_process_group()
        rank.wait_for_device()
        return
    works = [dist.all_reduce(t, async_op=True) for _ in range(3)]
    store.set("1 waits", "")

    def wait() -> None:
        for work in works:
            work.wait()
        rank.wait_for_device()  # a stream that stays stuck hangs here
        dist.all_reduce(rank.full(10, 1.0))

    _fails(wait, lossycoll.AbortedError)
    _must_be_usable(rank, t)


@TABLE.check()
def destroyed_with_calls_pending(rank: Rank) -> None:
    """Of which some can never be done, as the other rank doesn't make them."""
    t = rank.full(1_000_000, 7.0)
    works = [dist.all_reduce(t, async_op=True) for _ in range(4)]
    if rank.rank == 0:
        works += [dist.all_reduce(rank.full(3_000_000, 1.0), async_op=True) for _ in range(3)]
        works[-1].get_future()
    dist.destroy_process_group()
    rank.wait_for_device()
    assert torch.eye(8, device=rank.device).sum().item() == 8
    del works


@TABLE.check(cuda=True)
def no_memory_on_the_device(rank: Rank) -> None:
    """For the dense copy of a strided tensor: an error of its rank; the others get one as well,
    or the group goes on. Nobody hangs."""
    wide = torch.ones(64 << 20, 2, device=rank.device)
    dist.barrier()
    torch.cuda.synchronize()
    if rank.rank == 1:
        torch.cuda.empty_cache()
        used = torch.cuda.memory_reserved()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((used + (1 << 20)) / total)
    try:
        work = dist.all_reduce(wide[:, 0], async_op=True)
        work.wait()
        torch.cuda.synchronize()
        outcome = "served"
    except (lossycoll.LossyError, torch.OutOfMemoryError) as error:
        outcome = type(error).__name__
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    print(f"no_memory_on_the_device: {outcome}", flush=True)
    _must_be_usable(rank)


@TABLE.check(cuda=True)
def the_group_serves_after_the_users_own_lack_of_memory(rank: Rank) -> None:
    works = [dist.all_reduce(rank.full(500_000, 1.0), async_op=True) for _ in range(4)]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device=rank.device)
    for work in works:
        work.wait()
    t = rank.full(1000, 1.0)
    dist.all_reduce(t)
    assert (t == rank.world).all()
