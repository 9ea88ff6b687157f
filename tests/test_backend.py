"""The backend among torch's own users: every collective, DDP and friends, and its life cycle.

A function ``rank_...`` runs on the ranks; one set of processes does many checks.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import warnings
from datetime import timedelta
from typing import Any

import pytest
from harness import init, run_good, run_ranks

QUIET = {"LOSSYCOLL_LOG": "off"}
LOSSY_10 = {**QUIET, "LOSSYCOLL_INJECT": "loss=0.1,seed=7", "LOSSYCOLL_DEADLINE_MIN": "0.02"}


# ---- every collective gives what gloo gives ----


def rank_collectives(rank: int, world: int) -> int:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)  # the names of torch 2.12
    init()
    gloo = dist.new_group(backend="gloo")
    done = 0

    def same(name: str, run: Any, *, exact: bool = True) -> None:
        """``run(group)`` returns tensors; they must be alike on a lossy and on a gloo group."""
        nonlocal done
        got, wanted = run(None), run(gloo)
        for one, two in zip(got, wanted, strict=True):
            assert one.dtype == two.dtype, name
            if exact:
                assert torch.equal(one, two), (name, one, two)
            else:
                torch.testing.assert_close(
                    one, two, rtol=2e-2 if one.itemsize == 2 else 1e-5, atol=0
                )
        done += 1

    def data(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed * 100 + rank)
        return torch.randint(0, 4, (n,), generator=generator).to(dtype)

    ops = dist.ReduceOp
    floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for n in (1, 7, 4096, 50_001):
        for dtype in floats:
            for op in (ops.SUM, ops.AVG, ops.MAX, ops.MIN, ops.PRODUCT):

                def all_reduce(group: Any) -> list[torch.Tensor]:
                    t = data(n, dtype)  # noqa: B023 (called before the loop goes on)
                    dist.all_reduce(t, op, group=group)  # noqa: B023
                    return [t]

                same(f"all_reduce {dtype} {op} {n}", all_reduce, exact=op != ops.AVG)
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool):
        for op in (ops.SUM, ops.MAX, ops.MIN, ops.PRODUCT, ops.BAND, ops.BOR, ops.BXOR):
            if dtype == torch.bool and op == ops.BXOR:
                continue  # gloo's is of the bytes

            def all_reduce_whole(group: Any) -> list[torch.Tensor]:
                t = data(3001, dtype)  # noqa: B023
                dist.all_reduce(t, op, group=group)  # noqa: B023
                return [t]

            same(f"all_reduce {dtype} {op}", all_reduce_whole)

    for n in (1, 5000, 300_000):
        for dtype in (torch.float32, torch.int64, torch.uint8):
            for root in {0, world - 1}:

                def broadcast(group: Any) -> list[torch.Tensor]:
                    t = data(n, dtype, seed=1)  # noqa: B023
                    dist.broadcast(t, root, group=group)  # noqa: B023
                    return [t]

                def reduce(group: Any) -> list[torch.Tensor]:
                    t = data(n, dtype, seed=2)  # noqa: B023
                    dist.reduce(t, root, group=group)  # noqa: B023
                    return [t] if rank == root else []  # noqa: B023

                def gather(group: Any) -> list[torch.Tensor]:
                    t = data(n, dtype, seed=3)  # noqa: B023
                    out = [torch.zeros_like(t) for _ in range(world)] if rank == root else None  # noqa: B023
                    dist.gather(t, out, root, group=group)  # noqa: B023
                    return out or []

                def scatter(group: Any) -> list[torch.Tensor]:
                    t = torch.zeros(n, dtype=dtype)  # noqa: B023
                    parts = [data(n, dtype, seed=j) for j in range(world)]  # noqa: B023
                    dist.scatter(t, parts if rank == root else None, root, group=group)  # noqa: B023
                    return [t]

                same(f"broadcast {dtype} {n} from {root}", broadcast)
                same(f"reduce {dtype} {n} to {root}", reduce)
                same(f"gather {dtype} {n} to {root}", gather)
                same(f"scatter {dtype} {n} from {root}", scatter)

            def all_gather(group: Any) -> list[torch.Tensor]:
                t = data(n, dtype, seed=4)  # noqa: B023
                out = [torch.zeros_like(t) for _ in range(world)]
                dist.all_gather(out, t, group=group)
                flat = torch.zeros(world * n, dtype=dtype)  # noqa: B023
                dist.all_gather_into_tensor(flat, t, group=group)
                return [*out, flat]

            def all_to_all(group: Any) -> list[torch.Tensor]:
                t = data(n * world, dtype, seed=5)  # noqa: B023
                out = torch.zeros_like(t)
                dist.all_to_all_single(out, t, group=group)
                return [out]

            same(f"all_gather {dtype} {n}", all_gather)
            same(f"all_to_all {dtype} {n}", all_to_all)

        for dtype in (*floats, torch.int32):

            def reduce_scatter(group: Any) -> list[torch.Tensor]:
                t = data(n * world, dtype, seed=6)  # noqa: B023
                out, listed = torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype)  # noqa: B023
                dist.reduce_scatter_tensor(out, t, group=group)
                dist.reduce_scatter(listed, list(t.chunk(world)), group=group)
                return [out, listed]

            same(f"reduce_scatter {dtype} {n}", reduce_scatter)

    def uneven(group: Any) -> list[torch.Tensor]:
        # Rank i sends i + j rows to rank j; so rank 0 sends itself nothing.
        send = [rank + j for j in range(world)]
        t = torch.arange(sum(send) * 3, dtype=torch.float32).view(-1, 3) + 1000 * rank
        out = torch.zeros(sum(send), 3)
        dist.all_to_all_single(out, t, send, send, group=group)
        lists = [torch.full((rank + j,), 10 * rank + j) for j in range(world)]
        outs = [torch.zeros(rank + j, dtype=torch.int64) for j in range(world)]
        if group is not None:  # gloo on 2.13 has no alltoall of lists
            return [out, *[torch.full((rank + j,), 10 * j + rank) for j in range(world)]]
        dist.all_to_all(outs, lists, group=group)
        return [out, *outs]

    same("uneven all_to_all", uneven)

    # What gloo can't: complex numbers, bools and 16-bit integers.
    for dtype in (torch.complex64, torch.bool, torch.int16):
        t = data(5000, dtype, seed=9)
        listed = [torch.zeros_like(t) for _ in range(world)]
        dist.all_gather(listed, t)
        assert torch.equal(listed[rank], t)
        dist.broadcast(t, 1)
        assert torch.equal(listed[1], t)
        if dtype is not torch.bool:
            dist.all_reduce(t)
            assert torch.equal(t, listed[1] * world)

    # Tensors as users hand them in: strided, transposed, with a gradient, of no dimension, empty.
    base = torch.arange(60_000, dtype=torch.float32).view(200, 300) + rank
    for name, view in (
        ("transposed", base.t()),
        ("every second", base[:, ::2]),
        ("with gradient", base.clone().requires_grad_()),
        ("scalar", torch.tensor(float(rank))),
        ("empty", torch.zeros(0)),
        ("slice", base[3:7]),
    ):

        def strided(group: Any) -> list[torch.Tensor]:
            t = view.detach().clone(memory_format=torch.preserve_format)  # noqa: B023
            if group is not None:
                t = t.contiguous()  # gloo takes a strided tensor for a dense one
            elif not view.is_contiguous():  # noqa: B023
                t = torch.empty(base.numel() * 2).as_strided(view.shape, view.stride())  # noqa: B023
                t.copy_(view)  # noqa: B023
            t.requires_grad_(view.requires_grad)  # noqa: B023
            dist.all_reduce(t, group=group)
            dist.broadcast(t, world - 1, group=group)
            return [t.detach()]

        same(name, strided)

    out = torch.zeros(world, 40_000).t()  # gathers into columns
    dist.all_gather_single(out.t().contiguous(), torch.ones(40_000))
    target = torch.zeros(40_000 * world * 2)[::2]
    dist.all_gather_single(target, torch.full((40_000,), float(rank)))
    assert all((target[r * 40_000 : (r + 1) * 40_000] == r).all() for r in range(world))

    # Coalesced forms, objects, sparse, point to point, barriers.
    pg = dist.group.WORLD
    several = [torch.full((n,), float(rank)) for n in (3, 20_000)]
    pg.allreduce_coalesced(several, dist.AllreduceCoalescedOptions()).wait()
    assert all((t == sum(range(world))).all() for t in several)
    outs = [torch.zeros(n * world) for n in (3, 20_000)]
    pg.all_gather_single_coalesced(outs, several).wait()
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 1000 * rank})
    assert [o["rank"] for o in objects] == list(range(world))
    listed = [None] if rank else ["from 0"]
    dist.broadcast_object_list(listed, 0)
    assert listed == ["from 0"]
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (world,))
    dist.all_reduce(sparse)
    assert torch.equal(sparse.to_dense(), torch.ones(world))
    right, left = (rank + 1) % world, (rank - 1) % world
    got = torch.zeros(30_000)
    work = dist.irecv(got, left)
    dist.send(torch.full((30_000,), float(rank)), right)
    work.wait()
    assert (got == left).all()
    if rank == 0:
        for _ in range(world - 1):
            assert dist.recv(got) == int(got[0]) > 0
    else:
        dist.send(torch.full((30_000,), float(rank)), 0)
    dist.barrier()  # rank 0 takes from anybody: nothing else may be on its way to it
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.ones(5), right), dist.P2POp(dist.irecv, got[:5], left)]
    )
    for request in requests:
        request.wait()
    dist.barrier()
    pg.monitored_barrier()  # torch 2.13 lets dist.monitored_barrier through for gloo alone
    dist.destroy_process_group()
    return done


@pytest.mark.parametrize("world", [2, 3])
def test_every_collective_gives_what_gloo_gives(world: int) -> None:
    assert min(run_good(rank_collectives, world, QUIET)) > 150


def test_reliable_collectives_lose_nothing_of_what_injection_drops() -> None:
    env = {**LOSSY_10, "LOSSYCOLL_DELIVERY": "reliable"}
    assert min(run_good(rank_collectives, 2, env, timeout=200)) > 150


# ---- which way a call takes, blocks of code, figures ----


def rank_ways(rank: int, world: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    import lossycoll

    init(pg_options=lossycoll.Options(lossy_min_bytes=40_000))
    out: dict[str, Any] = {"before": lossycoll.last_report()}

    def missing(run: Any) -> int:
        run()
        report = lossycoll.last_report()
        assert report is not None
        return report.packets_missing + report.kept + report.own_filled

    big, small = torch.ones(2_000_000), torch.ones(9_999)
    whole = torch.ones(1_000_000, dtype=torch.int64)
    part = torch.ones(2_000_000 // world)
    rows = torch.ones(2_000_000)
    out["all_reduce"] = missing(lambda: dist.all_reduce(big))
    out["avg"] = missing(lambda: dist.all_reduce(big, dist.ReduceOp.AVG))
    out["reduce_scatter"] = missing(lambda: dist.reduce_scatter_single(part, big))
    out["max"] = missing(lambda: dist.all_reduce(big, dist.ReduceOp.MAX))
    out["integers"] = missing(lambda: dist.all_reduce(whole))
    out["small"] = missing(lambda: dist.all_reduce(small))
    out["broadcast"] = missing(lambda: dist.broadcast(big, 0))
    out["all_gather"] = missing(lambda: dist.all_gather_single(rows, part))
    with lossycoll.reliable():
        out["reliable block"] = missing(lambda: dist.all_reduce(big))
    with lossycoll.lossy(lossy_min_bytes=1000, on_missing="keep"):
        out["lossy block"] = missing(lambda: dist.all_reduce(torch.ones(200_000)))
        report = lossycoll.last_report()
        assert report is not None
        assert report.own_filled == 0
        out["lossy broadcast"] = missing(lambda: dist.broadcast(big, world - 1))
        out["lossy all_gather"] = missing(lambda: dist.all_gather_single(rows, part))
        out["lossy integers"] = missing(lambda: dist.broadcast(whole, 0))
        with lossycoll.reliable():
            out["inner block"] = missing(lambda: dist.all_reduce(big))
        seen: list[int] = []
        thread = threading.Thread(
            target=lambda: seen.append(missing(lambda: dist.all_reduce(small)))
        )
        thread.start()
        thread.join()
        out["another thread"] = seen[0]
    with lossycoll.lossy(repair=3):
        out["repair"] = missing(lambda: dist.all_reduce(big))
        assert lossycoll.last_report().packets_resent > 0

    stats = lossycoll.stats()
    assert stats.rank == rank
    assert stats.world == world
    assert stats.packets_injected > 0
    assert 0 < stats.loss_rate < 0.2
    assert [peer.rank for peer in stats.peers] == list(range(world))
    assert stats.calls == len(out) - 1  # "before" is no call
    with pytest.raises(lossycoll.UnsupportedError, match="backend 'lossy'"):
        lossycoll.stats(dist.new_group(backend="gloo"))
    dist.barrier()
    everyone = lossycoll.group_stats()
    assert sorted(everyone) == list(range(world))
    dist.destroy_process_group()
    return out


def test_ways_blocks_and_figures() -> None:
    lossy = {
        "all_reduce",
        "avg",
        "reduce_scatter",
        "lossy block",
        "lossy broadcast",
        "lossy all_gather",
    }
    for rank, out in enumerate(run_good(rank_ways, 2, LOSSY_10)):
        if rank == 1:
            assert out.pop("lossy broadcast") == 0  # it was the root
        assert out.pop("before") is None
        assert out.pop("repair") < out["all_reduce"]
        for name, missing in out.items():
            assert (missing > 0) == (name in lossy), (name, missing)


# ---- torch's own users ----


def _train(world: int, steps: int = 4, hook: Any = None) -> Any:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512),
        torch.nn.ReLU(),
        torch.nn.BatchNorm1d(512),
        torch.nn.Linear(512, 512),
        torch.nn.Linear(512, 8),
    )
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.3)
    if hook is not None:
        parallel.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.05)
    torch.manual_seed(int(os.environ["RANK"]))
    for step in range(steps):
        context = parallel.no_sync() if step == 1 else contextlib.nullcontext()
        with context:
            parallel(torch.randn(16, 64)).square().mean().backward()
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in parallel.parameters()]


def rank_users(rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
        allreduce_hook,
        fp16_compress_hook,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import lossycoll

    init()
    for hook in (None, allreduce_hook, fp16_compress_hook):
        parameters = _train(world, hook=hook)
        for parameter in parameters:
            first = parameter.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, parameter)
    assert lossycoll.stats().operations > 10

    mesh = init_device_mesh("cpu", (world,))
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.randn(4, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    full = torch.arange(64.0 * 128).view(64, 128)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    assert torch.equal(sharded.full_tensor(), full)
    assert torch.equal((sharded + sharded).redistribute(mesh, [Replicate()]).to_local(), full * 2)

    model = torch.nn.Linear(300, 300)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.randn(4, 300)).sum().backward()
    zero.step()

    import torch.distributed._functional_collectives as fc

    assert (fc.all_reduce(torch.ones(30_000), "sum", dist.group.WORLD) == world).all()
    gathered = fc.all_gather_tensor(torch.full((3, 5), rank), 0, dist.group.WORLD)
    assert gathered.shape == (3 * world, 5)
    dist.destroy_process_group()


def test_ddp_fsdp_dtensor_zero_and_functional_collectives() -> None:
    run_good(rank_users, 2, QUIET, timeout=200)


def rank_ddp_with_loss(rank: int, world: int) -> float:
    import torch
    import torch.distributed as dist

    import lossycoll

    init()
    parameters = _train(world, steps=6)
    stats = lossycoll.stats()
    assert stats.packets_injected > 0
    assert stats.packets_missing > 0
    flat = torch.cat([p.reshape(-1) for p in parameters])
    with lossycoll.reliable():
        mean = flat.clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
    dist.destroy_process_group()
    assert torch.isfinite(flat).all()
    return float((flat - mean).norm() / mean.norm())


def test_ddp_trains_on_with_loss_and_replicas_stay_near() -> None:
    drifts = run_good(rank_ddp_with_loss, 3, {**LOSSY_10, "LOSSYCOLL_MTU": "1500"})
    assert all(0 < drift < 0.2 for drift in drifts), drifts


# ---- completion without a wait ----


def rank_completion(rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    init()
    t = torch.full((100_000,), float(rank))
    work = dist.all_reduce(t, async_op=True)
    future = work.get_future()
    child = future.then(lambda done: float(done.value()[0][0]))
    assert child.wait() == sum(range(world))
    assert work.is_completed()
    assert work.is_success()

    # Staged through a copy: the caller's tensor must be right when the future fires.
    grid = torch.full((400, 400), float(rank)).t()[:, ::2]
    seen = dist.all_reduce(grid, async_op=True).get_future().then(lambda _: float(grid[0, 0]))
    assert seen.wait() == sum(range(world))

    # Dropped works and tensors: the operation owns what it needs until it is done.
    for i in range(40):
        dist.all_reduce(torch.full((50_000,), float(i)), async_op=True)
        if i % 10 == 0:
            gc.collect()
    last = torch.ones(50_000)
    dist.all_reduce(last)
    assert (last == world).all()

    # Many in flight, waited for in another order, futures among them.
    tensors = [torch.full((30_000 + i,), float(i)) for i in range(30)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    futures = [work.get_future() for work in works[::3]]
    for work in reversed(works):
        work.wait()
    torch.futures.wait_all(futures)
    assert all((t == i * world).all() for i, t in enumerate(tensors))
    work = dist.all_reduce(torch.ones(20_000), async_op=True)
    assert work.wait(timedelta(seconds=20))
    dist.destroy_process_group()


def test_works_complete_by_wait_by_future_and_when_dropped() -> None:
    run_good(rank_completion, 2, QUIET)


# ---- life ----


def rank_aliases(rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    init()
    n = 100_000
    total = world * (world + 1) / 2
    for start in (0, n // 2, n * (world - 1), rank * n):
        b = torch.arange(world * n, dtype=torch.float64) * (rank + 1)
        wanted = b[rank * n : rank * n + n] / (rank + 1) * total
        dist.reduce_scatter_tensor(b[start : start + n], b)
        assert torch.equal(b[start : start + n], wanted), start

        b = torch.full((world * n,), -1.0)
        b[start : start + n] = rank
        dist.all_gather_into_tensor(b, b[start : start + n])
        assert torch.equal(b, torch.arange(float(world)).repeat_interleave(n)), start
    b = torch.arange(world).repeat_interleave(n) + rank * world
    dist.all_to_all_single(b, b)
    assert torch.equal(b, (torch.arange(world) * world + rank).repeat_interleave(n))
    b = torch.arange(float((world + 1) * n))
    wanted = b[: world * n].reshape(world, n)[rank].repeat(world)
    dist.all_to_all_single(b[n:], b[: world * n])
    assert torch.equal(b[n:], wanted)
    b = torch.arange(float(world * n))
    dist.scatter(b[:n], list(b.view(world, n).unbind()) if rank == 0 else None, 0)
    assert torch.equal(b[:n], torch.arange(float(n)) + rank * n)
    dist.destroy_process_group()


def test_outputs_may_overlap_inputs() -> None:
    run_good(rank_aliases, 3, {**QUIET, "LOSSYCOLL_DEADLINE_MIN": "5"})


def rank_buffers(rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    init(pg_options={"socket_buffer": 2304, "mtu": 9000})
    dist.barrier()
    group = dist.new_group(backend="lossy", pg_options={"socket_buffer": 53_248, "mtu": 9000})
    t = torch.ones(300_000)
    dist.broadcast(t, 0, group=group)
    dist.destroy_process_group()


def test_a_small_buffer_makes_small_packets_or_a_warning() -> None:
    for outcome in run_ranks(rank_buffers, 4, {"LOSSYCOLL_INTERFACE": "lo"}):
        assert not outcome.error, str(outcome)
        assert outcome.stderr.count("the receive buffer of 4608 bytes can't hold") == 1
        assert "of the 3 other ranks" in outcome.stderr
        assert "net.core.rmem_max" in outcome.stderr
        assert " payload 7616 " in outcome.stderr, outcome.stderr


def rank_fragments(rank: int, world: int) -> None:
    import torch.distributed as dist

    from lossycoll import group
    from lossycoll.calls import LONGEST, bounded
    from lossycoll.interfaces import Interface

    group.choose = lambda wanted, master: Interface("lo", "127.0.0.1", 1500)
    init(pg_options={"mtu": 9000})
    dist.destroy_process_group()
    assert bounded(timedelta.max) == bounded(timedelta(days=-1)) == LONGEST
    assert bounded(timedelta(seconds=5)) == timedelta(seconds=5)


def test_an_mtu_above_the_interfaces_is_warned_of() -> None:
    for outcome in run_ranks(rank_fragments, 2):
        assert not outcome.error, str(outcome)
        text = "option mtu is 9000, but that of lo (127.0.0.1) is 1500"
        assert outcome.stderr.count(text) == 1, str(outcome)


def test_overflow_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    from lossycoll.communicator import Communicator
    from lossycoll.health import Health
    from lossycoll.options import Options

    health = Health(1, 4, addresses=[], liveness=10.0, control=None, on_failure=lambda error: None)
    communicator = Communicator(
        health, options=Options(), group=0, timeout=1.0, engine=None, control=None
    )
    for packets in (0, 7, 9):
        communicator._warn_of_overflow(packets)
    (record,) = caplog.records
    assert "rank 1/4: the kernel dropped 7 packets" in record.getMessage()
    assert "net.core.rmem_max" in record.getMessage()


def rank_groups(rank: int, world: int) -> list[str]:
    import torch
    import torch.distributed as dist

    import lossycoll

    before = {thread.name for thread in threading.enumerate()}
    init(backend="cpu:lossy")
    assert dist.get_backend() in ("lossy", "cpu:lossy")
    pairs = [dist.new_group([i, (i + 1) % world], backend="lossy") for i in range(world)]
    exact = dist.new_group(backend="lossy", pg_options={"delivery": "reliable"})
    for i, pair in enumerate(pairs):
        if rank in (i, (i + 1) % world):
            t = torch.ones(20_000)
            dist.all_reduce(t, group=pair)
            assert (t == 2).all()
            assert lossycoll.stats(pair).world == 2
    t = torch.ones(20_000)
    dist.all_reduce(t, group=exact)
    assert lossycoll.last_report(exact).op == 0
    alone = [dist.new_group([i], backend="lossy") for i in range(world)][rank]
    dist.all_reduce(t, group=alone)
    dist.barrier(group=alone)
    assert (t == world).all()
    assert lossycoll.stats(alone).world == 1
    assert lossycoll.last_report(alone) is None
    pg = dist.group.WORLD
    dist.destroy_process_group(exact)
    dist.destroy_process_group()
    with pytest.raises(lossycoll.ClosedError, match="destroyed"):
        pg.allreduce([t])
    leaked = {thread.name for thread in threading.enumerate()} - before
    assert not leaked, leaked

    init()  # over the same store, where the keys of the first group still are
    t = torch.full((20_000,), float(rank))
    dist.all_reduce(t)
    assert (t == sum(range(world))).all()

    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                dist.all_reduce(t)
            except lossycoll.ClosedError as error:
                code = 0 if "forked" in str(error) else 2
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    dist.all_reduce(t)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        dist.destroy_process_group(dist.new_group(backend="lossy"))
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    return sorted(before)


def test_groups_come_and_go() -> None:
    # The ranks end without destroy_process_group: threads must be joined at exit all the same.
    run_good(rank_groups, 3, QUIET)


def rank_exit_late(rank: int, world: int) -> None:
    import time

    import torch
    import torch.distributed as dist

    init()
    for i in range(20):
        t = torch.ones(60_000)
        dist.all_reduce(t)
        dist.broadcast(t, i % world)
    time.sleep(rank * 0.4)
    dist.destroy_process_group()


def test_ranks_may_leave_one_after_another() -> None:
    # With loss, what a rank that leaves has confirmed last may not have arrived.
    env = {**LOSSY_10, "LOSSYCOLL_DELIVERY": "reliable"}
    run_good(rank_exit_late, 3, env, timeout=60)


def rank_imported(rank: int, world: int) -> list[str]:
    import torch.distributed as dist

    early = [name for name in sys.modules if name.startswith("lossycoll")]
    init()
    dist.barrier()
    dist.destroy_process_group()
    return early


def test_torch_finds_the_backend_without_an_import() -> None:
    for early in run_good(rank_imported, 2, QUIET):
        assert set(early) <= {"lossycoll", "lossycoll._autoload"}


def test_the_package_imports_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys, lossycoll\n"
        "print([m for m in ('torch', 'numpy', '_cffi_backend') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_one_line_per_rank_says_what_is_in_use() -> None:
    for outcome in run_ranks(rank_imported, 2):
        lines = [line for line in outcome.stderr.splitlines() if line.startswith("lossycoll: ")]
        assert len(lines) == 1, outcome.stderr
        for part in (f"rank {outcome.rank}/2", "127.0.0.1:", "dev lo", "mtu 9000", "payload 8896"):
            assert part in lines[0]


# ---- a torchrun restart leaves stale keys in the store ----


def test_a_restart_by_torchrun_finds_no_stale_ranks(tmp_path: Any) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, signal, torch, torch.distributed as dist\n"
        "dist.init_process_group('lossy')\n"
        "t = torch.ones(50_000)\n"
        "dist.all_reduce(t)\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and dist.get_rank() == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.all_reduce(t)\n"
        "assert (t == 4).all()\n"
        "print('GOOD' + os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "dist.destroy_process_group()\n"
    )
    env = {**os.environ, **QUIET, "LOSSYCOLL_LIVENESS": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"),
            *("--nproc-per-node", "2", "--local-addr", "127.0.0.1", str(script)),
        ],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("GOOD1") == 2


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("LOSSYCOLL_")]:
        monkeypatch.delenv(name)
