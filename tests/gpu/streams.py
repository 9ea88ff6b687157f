"""Order on the device: what a call waits for, who waits for it, and what memory it holds.

Ranks are delayed by kernels that only sleep, so that a copy that doesn't wait for its stream reads,
or is overwritten by, what is wrong.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lossycoll
from tests.gpu.checks import Rank, Table
from tests.support.surface_kit import Op

TABLE = Table(init={"pg_options": {"lossy_min_bytes": 1 << 30}})

POISON = -12345.0
CYCLES_PER_MS = 1_900_000
"""About, at the H100's clock; nothing relies on it."""


def _sleep(ms: float) -> None:
    torch.cuda._sleep(int(ms * CYCLES_PER_MS))


def _total(rank: Rank, value: float = 1.0) -> float:
    """The ranks' sum of ``value`` + rank."""
    return sum(value + one for one in range(rank.world))


@TABLE.check(cuda=True)
def the_copy_waits_for_kernels_before_the_call(rank: Rank) -> None:
    for size in (10, 30_000, 3_000_000):
        t = rank.full(size, POISON)
        torch.cuda.synchronize()
        _sleep(30)
        t.fill_(rank.rank + 1.0)
        dist.all_reduce(t)
        assert (t == _total(rank)).all(), (size, t[:4])


@TABLE.check(cuda=True)
def kernels_after_wait_wait_for_the_result(rank: Rank) -> None:
    for size in (10, 30_000, 3_000_000):
        t = rank.full(size, rank.rank + 1.0)
        work = dist.all_reduce(t, async_op=True)
        work.wait()
        doubled = t * 2  # queued before the result is there
        t.fill_(POISON)
        assert (doubled == 2 * _total(rank)).all(), (size, doubled[:4])


@TABLE.check(cuda=True)
def a_call_on_a_side_stream(rank: Rank) -> None:
    """Only that stream's kernels count; a stream that waits for its event has the result too."""
    side, third = torch.cuda.Stream(), torch.cuda.Stream()
    t = rank.full(500_000, POISON)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _sleep(20)
        t.fill_(rank.rank + 1.0)
        work = dist.all_reduce(t, async_op=True)
        work.wait()
        done = side.record_event()
    third.wait_event(done)
    with torch.cuda.stream(third):
        elsewhere = t.clone()
    third.synchronize()
    assert (elsewhere == _total(rank)).all(), elsewhere[:4]


@TABLE.check(cuda=True)
def several_streams_wait_for_one_call(rank: Rank) -> None:
    """Waiting again, on another stream and from another thread, orders those as well."""
    from threading import Thread

    for turn in range(10):
        t = rank.full(200_000, rank.rank + 1.0)
        work = dist.all_reduce(t, async_op=True)
        found: list[Tensor] = []

        def look(found: list[Tensor] = found, work: Any = work, t: Tensor = t) -> None:
            torch.cuda.set_device(rank.device)
            with torch.cuda.stream(torch.cuda.Stream()):
                work.wait()
                found.append(t.clone())
                torch.cuda.current_stream().synchronize()

        thread = Thread(target=look)
        thread.start()
        with torch.cuda.stream(torch.cuda.Stream()):
            work.wait()
            found.append(t.clone())
            torch.cuda.current_stream().synchronize()
        thread.join()
        assert len(found) == 2
        assert all((one == _total(rank)).all() for one in found), turn


@TABLE.check(cuda=True, limit=60)
def two_hundred_calls_in_any_order(rank: Rank) -> None:
    """Issued back to back on three streams that sleep, by calls of every size; waited for in an
    order and on streams that differ from rank to rank."""
    alike, own = random.Random(1), random.Random(2 + rank.rank)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    calls = []
    for turn in range(200):
        size = alike.choice([1, 17, 4096, 70_000, 1_500_000])
        kind = alike.choice(["sum", "mean", "max", "broadcast"])
        with torch.cuda.stream(own.choice(streams)):
            t = rank.full(size, POISON)
            if own.random() < 0.3:
                _sleep(own.random() * 3)
            t.fill_(rank.rank + float(turn))
            if kind == "broadcast":
                work = dist.broadcast(t, turn % rank.world, async_op=True)
                want = turn + float(turn % rank.world)
            else:
                op, want = {
                    "sum": (Op.SUM, _total(rank, turn)),
                    "mean": (Op.AVG, _total(rank, turn) / rank.world),
                    "max": (Op.MAX, turn + rank.world - 1.0),
                }[kind]
                work = dist.all_reduce(t, op, async_op=True)
        if own.random() < 0.1:
            time.sleep(own.random() / 500)
        calls.append((work, t, want, kind))
    own.shuffle(calls)
    found = []
    for work, t, want, kind in calls:
        with torch.cuda.stream(own.choice(streams)):
            work.wait()
            wrong = (t != want).sum()
        found.append((wrong, t.numel(), want, kind))
    torch.cuda.synchronize()
    bad = [(size, want, kind) for wrong, size, want, kind in found if wrong.item()]
    assert not bad, bad[:10]


@TABLE.check(cuda=True)
def memory_is_held_until_the_call_is_done(rank: Rank) -> None:
    """Tensors are dropped right after the call: its input is read all the same, and nothing is
    written where others have memory by then."""
    size = 400_000
    outs, guards = [], []
    torch.cuda.synchronize()
    for turn in range(30):
        _sleep(2)
        source = rank.full(size, rank.rank + float(turn))
        out = rank.full((rank.world, size), POISON)
        work = dist.all_gather_single(out, source, async_op=True)
        del source
        guards.append(rank.full(size, POISON))  # may take its place
        lost = rank.full(size, 1.0)
        dist.all_reduce(lost, async_op=True)
        del lost
        guards.append(rank.full(size, POISON))
        outs.append((work, out, turn))
        del work, out
    for work, out, turn in outs:
        work.wait()
        for one in range(rank.world):
            assert (out[one] == one + turn).all(), (turn, one, out[one][:4])
    dist.barrier()
    torch.cuda.synchronize()
    assert all((guard == POISON).all() for guard in guards)


@TABLE.check(cuda=True)
def memory_of_a_side_stream_needs_no_record_stream(rank: Rank) -> None:
    """A stream that waited may read; then the tensor's own stream reuses its memory."""
    side = torch.cuda.Stream()
    for turn in range(20):
        with torch.cuda.stream(side):
            t = rank.full(700_000, rank.rank + float(turn))
            work = dist.all_reduce(t, async_op=True)
        work.wait()
        seen = t.clone()
        torch.cuda.current_stream().synchronize()
        assert (seen == _total(rank, turn)).all(), (turn, seen[:4])
        del t, work
        with torch.cuda.stream(side):
            rank.full(700_000, POISON)


@TABLE.check(cuda=True)
def a_call_that_nobody_waits_for(rank: Rank) -> None:
    t = rank.full(100_000, rank.rank + 1.0)
    work = dist.all_reduce(t, async_op=True)
    end = time.monotonic() + 10
    while not work.is_completed():
        assert time.monotonic() < end, "is_completed() never said so"
        time.sleep(0.001)
    torch.cuda.synchronize()
    assert (t == _total(rank)).all()
    if _waits_by_stream():  # nothing but the device has to be asked
        t.fill_(rank.rank + 1.0)
        dist.all_reduce(t, async_op=True)
        torch.cuda.synchronize()
        assert (t == _total(rank)).all()


@TABLE.check(cuda=True)
def the_host_is_not_blocked_by_the_device(rank: Rank) -> None:
    """A call behind a long kernel returns, and so does its wait, long before the kernel ends."""
    t = rank.full(100_000, rank.rank + 1.0)
    dist.all_reduce(t.clone())  # whatever is made at the first call
    if not _waits_by_stream():
        pytest.skip("wait() blocks the host here: no stream waiting")
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.monotonic()
    _sleep(300)
    torch.cuda.synchronize()
    kernel = time.monotonic() - begin
    dist.barrier()
    begin = time.monotonic()
    _sleep(300)
    t.fill_(rank.rank + 1.0)
    work = dist.all_reduce(t, async_op=True)
    issued = time.monotonic() - begin
    work.wait()
    returned = time.monotonic() - begin
    assert (t == _total(rank)).all()
    ended = time.monotonic() - begin
    seen = f"kernel {kernel:.3f} s, issued {issued:.4f}, returned {returned:.4f}, ended {ended:.3f}"
    print(seen, flush=True)
    assert returned < kernel / 4, seen
    assert ended > kernel / 2, seen


@TABLE.check(cuda=True)
def the_host_is_not_blocked_by_a_late_rank(rank: Rank) -> None:
    """The last rank calls late: wait() returns on the others before that, and order is kept."""
    t = rank.full(100_000, rank.rank + 1.0)
    dist.all_reduce(t.clone())
    if not _waits_by_stream():
        pytest.skip("wait() blocks the host here: no stream waiting")
    late = 0.5
    dist.barrier()
    begin = time.monotonic()
    if rank.rank == rank.world - 1:
        time.sleep(late)
    work = dist.all_reduce(t, async_op=True)
    work.wait()
    returned = time.monotonic() - begin
    assert (t == _total(rank)).all()
    if rank.rank != rank.world - 1:
        assert returned < late / 2, f"{returned:.3f} s"


def _waits_by_stream() -> bool:
    """Whether the layer that serves the device says that streams can wait for the engine."""
    from lossycoll.devices.registry import device_of

    layer: Any = device_of(torch.zeros(1, device="cuda")).layer
    return bool(getattr(layer, "waits_by_stream", True))


# ---- futures ----


@TABLE.check(cuda=True)
def futures_order_the_stream_that_waits(rank: Rank) -> None:
    """The fault of gloo's futures under DDP (pytorch issue 155714): a stream of high priority
    that has waited for a future overtakes the copy of the result."""
    count, size = 10, 1_000_000
    tensors = [rank.full(size, rank.rank + 1.0) for _ in range(count)]
    urgent = torch.cuda.Stream(priority=-1)
    urgent.wait_stream(torch.cuda.current_stream())
    futures = [dist.all_reduce(t, async_op=True).get_future() for t in tensors]
    for future, t in zip(futures, tensors, strict=True):
        with torch.cuda.stream(urgent):
            future.wait()
            first, last = t[0].item(), t[-1].item()
        assert (first, last) == (_total(rank), _total(rank))


@TABLE.check(cuda=True)
def callbacks_of_futures_read_the_result(rank: Rank) -> None:
    """As DDP's hooks do: in .then, on whichever stream that runs; the work is dropped."""
    wanted = []
    for turn in range(30):
        bucket = rank.full(300_000, POISON)
        _sleep(1)
        bucket.fill_(rank.rank + float(turn))
        future = dist.all_reduce(bucket, async_op=True).get_future()
        halved = future.then(lambda done: done.value()[0] / 2)
        wanted.append((halved.then(lambda done: done.value() + 1), _total(rank, turn) / 2 + 1))
        del bucket, future, halved
    for future, want in wanted:
        got = future.wait()
        assert (got == want).all(), (want, got[:4])


@TABLE.check(cuda=True)
def futures_of_every_call(rank: Rank) -> None:
    source = rank.full(50_000, rank.rank + 1.0)
    outs = [rank.full(50_000, POISON) for _ in range(rank.world)]
    wide = rank.full(50_000 * rank.world, POISON)
    part = rank.full(50_000, POISON)
    group: Any = dist.group.WORLD
    futures = [
        dist.all_gather(outs, source, async_op=True).get_future(),
        dist.all_gather_single(wide, source, async_op=True).get_future(),
        dist.reduce_scatter_single(part, source.repeat(rank.world), async_op=True).get_future(),
        dist.barrier(async_op=True).get_future(),
        group.allreduce_coalesced([source.clone(), source.clone()]).get_future(),
    ]
    for future in futures:
        future.wait()
    for one in range(rank.world):
        assert (outs[one] == one + 1).all()
        assert (wide[one * 50_000 : (one + 1) * 50_000] == one + 1).all()
    assert (part == _total(rank)).all()
    assert (futures[-1].value()[0] == _total(rank)).all()


# ---- graphs ----


@TABLE.check(cuda=True)
def capturing_a_graph_is_refused(rank: Rank) -> None:
    """The capture can be ended, and the group serves what comes after it."""
    t = rank.full(1000, rank.rank + 1.0)
    dist.all_reduce(t.clone())
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        doubled = t * 2
        with pytest.raises(lossycoll.UnsupportedError):
            dist.all_reduce(t)
        with pytest.raises(lossycoll.UnsupportedError):
            dist.broadcast(t, 0, async_op=True)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(side)
    graph.replay()
    torch.cuda.synchronize()
    assert (doubled == 2 * (rank.rank + 1.0)).all()
    dist.all_reduce(t)
    assert (t == _total(rank)).all()
