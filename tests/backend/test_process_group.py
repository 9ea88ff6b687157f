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
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from tests.support.harness import EXACT, init, run_good, run_ranks

QUIET = {"LOSSYCOLL_LOG": "off"}
LOSSY_10 = {**QUIET, "LOSSYCOLL_INJECT": "loss=0.1,seed=7", "LOSSYCOLL_DEADLINE_MIN": "0.02"}


# ---- which way a call takes, blocks of code, figures ----


def rank_ways(rank: int, world: int) -> dict[str, Any]:
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
    from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
        allreduce_hook,
        fp16_compress_hook,
    )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

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
    run_good(rank_completion, 2, {**QUIET, **EXACT})


# ---- life ----


def rank_aliases(rank: int, world: int) -> None:
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
    run_good(rank_aliases, 3, {**QUIET, **EXACT})


def rank_buffers(rank: int, world: int) -> None:
    init(pg_options={"socket_buffer": 2304, "mtu": 9000})
    dist.barrier()
    bootstrap = dist.new_group(backend="lossy", pg_options={"socket_buffer": 53_248, "mtu": 9000})
    t = torch.ones(300_000)
    dist.broadcast(t, 0, group=bootstrap)
    dist.destroy_process_group()


def test_a_small_buffer_makes_small_packets_or_a_warning() -> None:
    for outcome in run_ranks(rank_buffers, 4, {"LOSSYCOLL_INTERFACE": "lo"}):
        assert not outcome.error, str(outcome)
        assert outcome.stderr.count("the receive buffer of 4608 bytes can't hold") == 1
        assert "of the 3 other ranks" in outcome.stderr
        assert "net.core.rmem_max" in outcome.stderr
        assert " payload=7616 " in outcome.stderr, outcome.stderr


def rank_fragments(rank: int, world: int) -> None:
    from lossycoll.backend import group_steps
    from lossycoll.runtime.core.call import LONGEST, bounded
    from lossycoll.runtime.net.interfaces import Interface

    group_steps.candidates = lambda wanted, master: [Interface("lo", "127.0.0.1", 1500)]
    init(pg_options={"mtu": 9000})
    dist.destroy_process_group()
    assert bounded(timedelta.max) == bounded(timedelta(days=-1)) == LONGEST
    assert bounded(timedelta(seconds=5)) == timedelta(seconds=5)


def test_an_mtu_above_the_interfaces_is_warned_of() -> None:
    for outcome in run_ranks(rank_fragments, 2):
        assert not outcome.error, str(outcome)
        text = "option mtu is 9000, but that of lo (127.0.0.1) is 1500"
        assert outcome.stderr.count(text) == 1, str(outcome)


def rank_groups(rank: int, world: int) -> list[str]:
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
    early = [name for name in sys.modules if name.startswith("lossycoll")]
    init()
    dist.barrier()
    dist.destroy_process_group()
    return early


def test_torch_finds_the_backend_without_an_import() -> None:
    for early in run_good(rank_imported, 2, QUIET, fresh=True):
        assert set(early) <= {"lossycoll", "lossycoll._autoload", "lossycoll.errors"}


def test_the_collector_does_not_walk_torch_while_the_backend_is_imported() -> None:
    code = (
        "import gc, sys, torch\n"
        "seen = []\n"
        "gc.callbacks.append(lambda phase, info: seen.append(info['generation']))\n"
        "from lossycoll._autoload import load\n"
        "seen.clear()\n"
        "load()\n"
        "found = [one for one in seen if one]\n"
        "gc.disable(); load()\n"
        "print('lossycoll.backend.process_group' in sys.modules, found, gc.isenabled())\n"
        "gc.enable(); load(); print(gc.isenabled())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["True [] False", "True"]


@pytest.mark.parametrize("first", ["torch", "lossycoll"])
def test_an_import_after_torchs_makes_the_backend_known(first: str) -> None:
    """Where torch loads no entry points. The option ``replace`` is torch's import's."""
    code = (
        f"import {first}, sys\n"
        "import torch.distributed as d\n"
        "names = [list(d.Backend._plugins)]\n"
        "import lossycoll\n"
        "names.append(list(d.Backend._plugins))\n"
        "helper = d.distributed_c10d._new_process_group_helper\n"
        "print(names, hasattr(helper, '__wrapped__'), 'lossycoll.backend' in sys.modules)\n"
    )
    env = {
        **os.environ,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "LOSSYCOLL_REPLACE": "gloo",
        "PYTHONWARNINGS": "error:lossycoll",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    known = ["LOSSY"] if first == "torch" else []
    assert done.stdout.strip() == f"[[], {known}] False False", done.stderr


def test_the_package_imports_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys, lossycoll\n"
        "print([m for m in ('torch', 'numpy', '_cffi_backend') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_one_line_per_rank_says_what_is_in_use() -> None:
    for outcome in run_ranks(rank_imported, 2):
        lines = [line for line in outcome.stderr.splitlines() if " lossycoll: " in line]
        assert len(lines) == 1, outcome.stderr
        for part in (f"rank={outcome.rank} world=2 event=ready ", "dev=lo", "payload=8896 "):
            assert part in lines[0]
        assert " address=127.0.0.1:" in lines[0]
        assert " control=127.0.0.1:" in lines[0]


# ---- a torchrun restart leaves stale keys in the store ----


@pytest.mark.long
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
    env = {**os.environ, **QUIET, "LOSSYCOLL_LIVENESS": "6", "OMP_NUM_THREADS": "1"}
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
