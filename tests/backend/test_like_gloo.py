"""Every collective gives what gloo gives: both in the same processes, one after the other."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from tests.support.harness import init, run_good
from tests.support.versions import TORCH


def rank_collectives(rank: int, world: int) -> int:
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
    pg.monitored_barrier()
    if TORCH >= (2, 14):  # 2.13 has it for gloo alone
        dist.monitored_barrier()
    dist.destroy_process_group()
    return done


def test_every_collective_gives_what_gloo_gives() -> None:
    assert min(run_good(rank_collectives, 3, {"LOSSYCOLL_LOG": "off"})) > 150


def test_reliable_collectives_lose_nothing_of_what_injection_drops() -> None:
    env = {
        "LOSSYCOLL_LOG": "off",
        "LOSSYCOLL_INJECT": "loss=0.1,seed=7",
        "LOSSYCOLL_DELIVERY": "reliable",
    }
    assert min(run_good(rank_collectives, 2, env, timeout=200)) > 150
