"""Every collective with tensors on the device: types, layouts, modes, sizes. What is wanted is
computed on the CPU by each rank, from the seeds of all; it must be exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lossycoll
from lossycoll.backend import on_device
from lossycoll.backend.work import ManyWork
from lossycoll.devices.registry import is_served
from tests.gpu.checks import Check, Rank, Table
from tests.support import surface_cases as cases
from tests.support.surface_kit import LAYOUTS, Kit, Op, data, operations
from tests.support.surface_kit import Table as Cases
from tests.support.versions import SAYS_FACTORS

TABLE = Table(init={"pg_options": {"lossy_min_bytes": 1 << 30}})
"""Reliable, so that a packet that a busy machine delivers late costs no exactness."""

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)
SUMMED = DTYPES[:-1]
LARGE = 15 * (1 << 20)
"""Elements of float32: 60 MiB, several chunks."""


def _collective(case: Callable[[Kit], None], rank: Rank) -> None:
    run = Cases(rank.rank, rank.world, device=rank.device)
    for dtype in DTYPES:
        run.kit(case.__name__, case, dtype, LAYOUTS[run.turn % len(LAYOUTS)])
    for layout in LAYOUTS:
        run.kit(case.__name__, case, layout=layout)
    _no_failures(run)


def _reduction(case: Callable[..., None], rank: Rank) -> None:
    run = Cases(rank.rank, rank.world, device=rank.device)
    for dtype in SUMMED:
        for op in operations(dtype):
            layout = LAYOUTS[run.turn % len(LAYOUTS)]
            run.kit(f"{case.__name__} {op}", lambda kit, op=op: case(kit, op), dtype, layout)
    for layout in LAYOUTS:
        run.kit(case.__name__, case, layout=layout)
    _no_failures(run)


def _odd(case: Callable[[Kit], None], dtypes: tuple[torch.dtype, ...], rank: Rank) -> None:
    if case is cases.premultiplied and not SAYS_FACTORS:
        pytest.skip("this torch doesn't let a backend see the factor of PREMUL_SUM")
    run = Cases(rank.rank, rank.world, device=rank.device)
    for dtype in dtypes:
        for _ in range(2):  # in another mode each time
            run.kit(case.__name__, case, dtype)
    _no_failures(run)


def _no_failures(run: Cases) -> None:
    assert run.done
    assert not run.failures, "\n".join(run.failures[:20])


for _case in cases.COPIES:
    TABLE.add(Check(_case.__name__, partial(_collective, _case)))
for _sum in cases.REDUCTIONS:
    TABLE.add(Check(_sum.__name__, partial(_reduction, _sum)))
for _other, _dtypes in cases.ODD:
    TABLE.add(Check(_other.__name__, partial(_odd, _other, _dtypes)))


@TABLE.check()
def point_to_point(rank: Rank) -> None:
    """send, recv, isend and irecv, from any source too, with tags, strided and empty tensors."""
    other = 1 - rank.rank
    if rank.rank > 1:
        return
    for dtype in DTYPES:
        for shape in ((), (0,), (7, 5), (300_000,)):
            sent = data(shape, dtype, rank.rank).to(rank.device)
            got = data(shape, dtype, 99).to(rank.device)
            want = data(shape, dtype, other)
            if rank.rank == 0:
                dist.send(sent, other)
                dist.recv(got, other)
            else:
                dist.recv(got)
                dist.send(sent, other)
            _same(got, want, f"send {dtype} {shape}")
    works, outs = [], []
    for tag in range(8):
        sent = data((1000 * tag,), torch.float32, 10 * rank.rank + tag).to(rank.device)
        works.append(dist.isend(sent, other, tag=tag))
        del sent
    for tag in reversed(range(8)):
        out = rank.full(1000 * tag, -1)
        works.append(dist.irecv(out, other, tag=tag))
        outs.append((tag, out))
    for work in works:
        work.wait()
    for tag, out in outs:
        _same(out, data((1000 * tag,), torch.float32, 10 * other + tag), f"tag {tag}")


@TABLE.check()
def in_pieces(rank: Rank) -> None:
    """Calls of one buffer whose parts are operations of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_device, "PIECE_BYTES", 4096)
        patch.setattr(on_device, "RANK_BYTES", 64)
        before = lossycoll.stats().operations
        run = Cases(rank.rank, rank.world, device=rank.device)
        for case in (cases.all_reduce, cases.broadcast):
            for layout in LAYOUTS:
                for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.int64):
                    run.kit(case.__name__, case, dtype, layout)
        _no_failures(run)
        for size in (1535, 1536, 1537, 2560, 2561, 100_003):  # around one piece, two, and many
            t = data((size,), torch.float32, rank.rank).to(rank.device)
            want = sum(data((size,), torch.float32, one) for one in range(rank.world))
            work = dist.all_reduce(t, async_op=True)
            assert work is not None
            if size % 2:
                work.get_future().wait()
            else:
                work.wait()
            _same(t, want, f"{size} elements")
            assert work.is_success()
            # Each piece counts: any of them may fail, and be the last to end.
            assert isinstance(work, ManyWork) == (is_served(t) and size > 1536)
        if is_served(t):
            assert lossycoll.stats().operations - before > run.done + 50


@TABLE.check()
def large(rank: Rank) -> None:
    """60 MiB, which travels in several chunks, sync and async; in place, and beside the input."""
    generator = torch.Generator().manual_seed(5)
    base = torch.randint(-1000, 1000, (LARGE,), generator=generator).float()

    def of(one: int) -> Tensor:
        return base.roll(one) + one

    want = sum((of(one) for one in range(1, rank.world)), of(0))
    own = of(rank.rank).to(rank.device)
    for mode in ("sync", "async", "future"):
        t = own.clone()
        work = dist.all_reduce(t, async_op=mode != "sync")
        if work is not None:
            work.get_future().wait() if mode == "future" else work.wait()
        _same(t, want, f"all_reduce {mode}")
    t = own.clone()
    dist.broadcast(t, 1)
    _same(t, of(1), "broadcast")
    part = LARGE // rank.world
    out = torch.empty(part, device=rank.device)
    dist.reduce_scatter_single(out, own)
    _same(out, want[rank.rank * part : (rank.rank + 1) * part], "reduce_scatter")
    whole = torch.empty(rank.world * part, device=rank.device)
    dist.all_gather_single(whole, own[:part])
    _same(whole, torch.cat([of(one)[:part] for one in range(rank.world)]), "all_gather")
    dist.all_to_all_single(whole, own)
    here = slice(rank.rank * part, (rank.rank + 1) * part)
    _same(whole, torch.cat([of(one)[here] for one in range(rank.world)]), "all_to_all")


@TABLE.check()
def large_mean_of_bfloat16(rank: Rank) -> None:
    """Chunks of a 16-bit type, one of whose ends is in the middle of a chunk; strided as well."""
    count = (1 << 23) + 12_345
    t = torch.arange(count, device=rank.device) % 128 + 2.0 * rank.rank
    want = (torch.arange(count) % 128 + float(rank.world - 1)).bfloat16()
    mean = t.bfloat16()
    dist.all_reduce(mean, Op.AVG)
    _same(mean, want, "dense")
    wide = torch.zeros(count, 2, dtype=torch.bfloat16, device=rank.device)
    wide[:, 1] = t
    dist.all_reduce(wide[:, 1], Op.AVG)
    _same(wide[:, 1], want, "strided")
    assert not wide[:, 0].any()


@TABLE.check()
def blocks(rank: Rank) -> None:
    """all_gather_blocks and reduce_scatter_blocks, which only this backend has."""
    group: Any = dist.group.WORLD
    chunk = 100_000
    rows = [data((chunk * rank.world,), torch.float32, one) for one in range(rank.world)]
    own = slice(rank.rank * chunk, (rank.rank + 1) * chunk)
    out = rank.full(chunk * rank.world, -1)
    out[own] = rows[rank.rank][own].to(rank.device)
    work = group.all_gather_blocks(out)
    work.wait()
    want = torch.cat([rows[one][one * chunk : (one + 1) * chunk] for one in range(rank.world)])
    _same(out, want, "all_gather_blocks")
    assert work.arrived.all()
    part = rank.full(chunk, -1)
    work = group.reduce_scatter_blocks(part, rows[rank.rank].to(rank.device))
    work.wait()
    total = sum(rows[1:], rows[0]) / rank.world
    _same(part, total[own], "reduce_scatter_blocks")
    assert not work.lost.any()


@TABLE.check()
def cpu_tensors_between(rank: Rank) -> None:
    """The same group serves tensors of both kinds, in turns, all pending at once."""
    works, wanted = [], []
    for turn in range(40):
        device = rank.device if turn % 3 else "cpu"
        size = 1 + 997 * turn
        t = torch.full((size,), float(rank.rank + turn), device=device)
        works.append(dist.all_reduce(t, async_op=True))
        wanted.append((t, float(sum(one + turn for one in range(rank.world)))))
    for work in works:
        work.wait()
    for t, want in wanted:
        assert (t == want).all(), (t.device, t.numel(), want, t[:4])


@TABLE.check()
def groups_and_threads(rank: Rank) -> None:
    """Two groups, each used by a thread of its own, at the same time. On a GPU each has its stream:
    in one stream what comes second waits for what comes first, which differs from rank to rank."""
    from concurrent.futures import ThreadPoolExecutor

    groups = [dist.new_group(), dist.new_group()]

    def use(number: int) -> None:
        with contextlib.ExitStack() as stack:
            if rank.cuda:
                torch.cuda.set_device(rank.device)
                stack.enter_context(torch.cuda.stream(torch.cuda.Stream()))
            take_turns(number)

    def take_turns(number: int) -> None:
        for turn in range(40):
            t = rank.full(3000 + 500 * turn, rank.rank + number)
            dist.all_reduce(t, group=groups[number])
            want = float(sum(one + number for one in range(rank.world)))
            assert (t == want).all(), (number, turn, t[:4])

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(use, number) for number in range(2)]:
            done.result()
    for group in groups:
        dist.destroy_process_group(group)


@TABLE.check(cuda=True)
def tensors_of_two_devices_are_refused(rank: Rank) -> None:
    """In one call; the group goes on as if it hadn't been made."""
    group: Any = dist.group.WORLD
    here, host = rank.full(4, 1), torch.ones(4)
    for outputs, source in (([host] * rank.world, here), ([here] * rank.world, host)):
        with pytest.raises(lossycoll.UnsupportedError):
            group.allgather([outputs], [source])
    mixed = [here.clone(), *[host] * (rank.world - 1)]
    with pytest.raises(lossycoll.UnsupportedError):
        group.allgather([mixed], [here])
    dist.all_reduce(here)
    assert (here == rank.world).all()


def _same(got: Tensor, want: Tensor, what: str) -> None:
    got = got.cpu()
    if got.dtype.itemsize == 1:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    assert torch.equal(got, want), f"{what}: got {got.flatten()[:8]}, want {want.flatten()[:8]}"
