"""The collectives that backend/test_surface.py runs, each as ``case(kit)``: call, and compare with
what the ranks' inputs say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.support.surface_kit import FLOATS, INTEGERS, Kit, Op, data, reduced
from tests.support.versions import SAYS_FACTORS, TORCH

# ---- copies ----


def broadcast(k: Kit) -> None:
    for root in {0, k.world - 1}:
        t = k.in_place(k.values(k.rank))
        k.run(dist.broadcast, t, root)
        k.same(t, k.values(root), root)


def all_gather(k: Kit) -> None:
    outs = [k.target() for _ in range(k.world)]
    k.run(dist.all_gather, outs, k.source(k.values(k.rank)))
    for rank, out in enumerate(outs):
        k.same(out, k.values(rank), rank)
    # Rows of one tensor, which in the end holds the input as well.
    rows = list(k.target((k.world, *k.shape)).detach())
    k.run(dist.all_gather, rows, k.source(k.values(k.rank)))
    for rank, row in enumerate(rows):
        k.same(row, k.values(rank), f"row {rank}")
        row.copy_(k.values(50 + rank if rank == k.rank else 99))
    k.run(dist.all_gather, rows, rows[k.rank])
    for rank, row in enumerate(rows):
        k.same(row, k.values(50 + rank), f"row {rank}, in place")


def all_gather_single(k: Kit) -> None:
    rows = [k.values(rank) for rank in range(k.world)]
    out = k.target((k.world, *k.shape))
    k.run(dist.all_gather_single, out, k.source(rows[k.rank]))
    k.same(out, torch.stack(rows), "stacked")
    if k.shape:
        out = k.target((k.world * k.shape[0], *k.shape[1:]))
        k.run(dist.all_gather_single, out, k.source(rows[k.rank]))
        k.same(out, torch.cat(rows), "concatenated")


def gather(k: Kit) -> None:
    root = k.world - 1
    outs = [k.target() for _ in range(k.world)] if k.rank == root else None
    k.run(dist.gather, k.source(k.values(k.rank)), outs, root)
    for rank, out in enumerate(outs or []):
        k.same(out, k.values(rank), rank)


def scatter(k: Kit) -> None:
    root = k.world - 1
    parts = [k.source(k.values(100 + rank)) for rank in range(k.world)] if k.rank == root else None
    out = k.target()
    k.run(dist.scatter, out, parts, root)
    k.same(out, k.values(100 + k.rank))


def all_to_all(k: Kit) -> None:
    """Rank i sends i + 2 j mod 3 rows to rank j: uneven, and some of them empty."""

    def part(sender: int, receiver: int) -> Tensor:
        rows = (sender + 2 * receiver) % 3
        shape = (rows, *k.shape[1:]) if k.shape else ()
        return k.values(10 * sender + receiver, shape)

    ins = [k.source(part(k.rank, rank)) for rank in range(k.world)]
    wants = [part(rank, k.rank) for rank in range(k.world)]
    outs = [k.target(tuple(want.shape)) for want in wants]
    k.run(dist.all_to_all, outs, ins)
    for rank, (out, want) in enumerate(zip(outs, wants, strict=True)):
        k.same(out, want, rank)


def all_to_all_single(k: Kit) -> None:
    if not k.shape:
        return
    send = [(k.rank + 2 * rank) % 3 for rank in range(k.world)]
    receive = [(rank + 2 * k.rank) % 3 for rank in range(k.world)]

    def part(sender: int, receiver: int) -> Tensor:
        rows = (sender + 2 * receiver) % 3
        return k.values(10 * sender + receiver, (rows, *k.shape[1:]))

    out = k.target((sum(receive), *k.shape[1:]))
    source = k.source(torch.cat([part(k.rank, rank) for rank in range(k.world)]))
    k.run(dist.all_to_all_single, out, source, receive, send)
    k.same(out, torch.cat([part(rank, k.rank) for rank in range(k.world)]), "uneven")

    whole = (k.world * 2, *k.shape[1:])
    out = k.target(whole)
    k.run(dist.all_to_all_single, out, k.source(k.values(k.rank, whole)))
    rows = [k.values(rank, whole)[2 * k.rank : 2 * k.rank + 2] for rank in range(k.world)]
    k.same(out, torch.cat(rows), "even")


COPIES = (
    broadcast,
    all_gather,
    all_gather_single,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
)


def ring(k: Kit) -> None:
    """Point to point, of what lies in memory in order."""
    if k.world == 1:
        return
    got = k.target()
    right, left = (k.rank + 1) % k.world, (k.rank - 1) % k.world
    ops = [
        dist.P2POp(dist.isend, k.source(k.values(k.rank)), right, k.group, k.rank),
        dist.P2POp(dist.irecv, got, left, k.group, left),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    k.same(got, k.values(left))


# ---- reductions ----


def all_rows(k: Kit, shape: tuple[int, ...] | None = None) -> list[Tensor]:
    return [k.values(rank, shape) for rank in range(k.world)]


def check(k: Kit, got: Tensor, rows: list[Tensor], op: Any) -> None:
    want = reduced(rows, op)
    if op == Op.AVG:  # the only one that rounds
        k.near(got, want)
    else:
        k.same(got, want, op)


def all_reduce(k: Kit, op: Any = Op.SUM) -> None:
    rows = all_rows(k)
    t = k.in_place(rows[k.rank])
    k.run(dist.all_reduce, t, op)
    check(k, t, rows, op)


def reduce(k: Kit, op: Any = Op.SUM) -> None:
    root = k.world - 1
    rows = all_rows(k)
    t = k.in_place(rows[k.rank])
    k.run(dist.reduce, t, root, op)
    if k.rank == root:
        check(k, t, rows, op)
    else:
        k.same(t, rows[k.rank], "not the root")


def reduce_scatter(k: Kit, op: Any = Op.SUM) -> None:
    """Of lists; of even parts first, then of parts as long as their rank's number."""
    for shapes in ([k.shape] * k.world, [(rank, 5) for rank in range(k.world)]):
        parts = [
            [k.values(10 * sender + rank, shape) for rank, shape in enumerate(shapes)]
            for sender in range(k.world)
        ]
        out = k.target(shapes[k.rank])
        k.run(dist.reduce_scatter, out, [k.source(part) for part in parts[k.rank]], op)
        check(k, out, [row[k.rank] for row in parts], op)


def reduce_scatter_single(k: Kit, op: Any = Op.SUM) -> None:
    rows = all_rows(k, (k.world, *k.shape))
    out = k.target()
    k.run(dist.reduce_scatter_single, out, k.source(rows[k.rank]), op)
    check(k, out, [row[k.rank] for row in rows], op)


REDUCTIONS = (all_reduce, reduce, reduce_scatter, reduce_scatter_single)


def premultiplied(k: Kit) -> None:
    """PREMUL_SUM by a number and by a tensor; every rank may have a factor of its own."""
    from torch._C._distributed_c10d import _make_nccl_premul_sum

    rows = [k.values(rank) * (0.5 if rank else 2.0) for rank in range(k.world)]
    own = 2.0 if k.rank == 0 else 0.5
    for factor in (own, k.here(torch.tensor([own], dtype=torch.float32))):
        op = _make_nccl_premul_sum(factor)
        t = k.in_place(k.values(k.rank))
        k.run(dist.all_reduce, t, op)
        k.same(t, reduced(rows, Op.SUM), "all_reduce")
        t = k.in_place(k.values(k.rank))
        k.run(dist.reduce, t, 0, op)
        if k.rank == 0:
            k.same(t, reduced(rows, Op.SUM), "reduce")
        wide = k.here(torch.stack([k.values(k.rank)] * k.world))
        out = k.target()
        k.run(dist.reduce_scatter_single, out, k.source(wide), op)
        k.same(out, reduced(rows, Op.SUM), "reduce_scatter_single")
        out = k.target()
        k.run(dist.reduce_scatter, out, list(wide), op)
        k.same(out, reduced(rows, Op.SUM), "reduce_scatter")


def extremes(k: Kit) -> None:
    """What is not a number at one rank is none in the result; infinities and zeros have a sign."""
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1.0], dtype=k.dtype)
    rows = [special.roll(rank) for rank in range(k.world)]
    for op, function in ((Op.MIN, torch.minimum), (Op.MAX, torch.maximum)):
        t = k.in_place(rows[k.rank])
        k.run(dist.all_reduce, t, op)
        want = rows[0]
        for row in rows[1:]:
            want = function(want, row)
        got = t.cpu()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


# ---- several as one ----


def coalescing_manager(k: Kit) -> None:
    for device in (None, k.device):
        rows = [k.values(rank) for rank in range(k.world)]
        several = [k.in_place(rows[k.rank]) for _ in range(3)]
        with _coalescing_manager(k.group, device, async_ops=k.mode != "sync") as manager:
            for t in several:
                dist.all_reduce(t, group=k.group)
        manager.wait()
        for t in several:
            check(k, t, rows, Op.SUM)
        outs = [k.target((k.world, *k.shape)) for _ in range(2)]
        with _coalescing_manager(k.group, device, async_ops=k.mode != "sync") as manager:
            for out in outs:
                dist.all_gather_single(out, k.source(rows[k.rank]), group=k.group)
        manager.wait()
        for out in outs:
            k.same(out, torch.stack(rows))
        outs = [k.target() for _ in range(2)]
        with _coalescing_manager(k.group, device, async_ops=k.mode != "sync") as manager:
            for out in outs:
                source = k.source(torch.stack([rows[k.rank]] * k.world))
                dist.reduce_scatter_single(out, source, group=k.group)
        manager.wait()
        for out in outs:
            check(k, out, rows, Op.SUM)
    # What has no form for several goes one by one, and is waited for at the end.
    t = k.in_place(rows[k.rank])
    with _coalescing_manager(k.group, k.device, async_ops=True) as manager:
        dist.broadcast(t, k.world - 1, group=k.group, async_op=True)
    manager.wait()
    k.same(t, rows[-1])


def coalesced(k: Kit) -> None:
    rows = all_rows(k)
    several = [k.in_place(rows[k.rank]) for _ in range(2)]
    k.run(dist.all_reduce_coalesced, several, Op.MAX)
    for t in several:
        check(k, t, rows, Op.MAX)
    lists = [[k.target(), k.target()] for _ in range(k.world)]
    k.run(dist.all_gather_coalesced, lists, [k.source(rows[k.rank]), k.source(rows[k.rank])])
    for rank, row in enumerate(lists):
        for t in row:
            k.same(t, rows[rank])


def functional(k: Kit) -> None:
    group: Any = k.group or dist.group.WORLD
    rows = all_rows(k)
    own = k.source(rows[k.rank]).detach()
    check(k, fc.wait_tensor(fc.all_reduce(own, "max", group)), rows, Op.MAX)
    check(k, fc.wait_tensor(fc.all_reduce(own, "sum", group)), rows, Op.SUM)
    k.same(fc.wait_tensor(fc.broadcast(own, k.world - 1, group)), rows[-1])
    k.same(fc.wait_tensor(fc.all_gather_tensor(own, 0, group)), torch.cat(rows))
    wide = [k.here(torch.cat([row] * k.world)) for row in rows]
    part = fc.wait_tensor(fc.reduce_scatter_tensor(wide[k.rank], "sum", 0, group))
    check(k, part, rows, Op.SUM)
    k.same(fc.wait_tensor(fc.all_to_all_single(wide[k.rank], None, None, group)), torch.cat(rows))
    for t in fc.all_reduce_coalesced([own, own], "sum", group):
        check(k, fc.wait_tensor(t), rows, Op.SUM)
    for t in fc.all_gather_into_tensor_coalesced([own, own], group):
        k.same(fc.wait_tensor(t), torch.cat(rows))
    for t in fc.reduce_scatter_tensor_coalesced([wide[k.rank]] * 2, "sum", [0, 0], group):
        check(k, fc.wait_tensor(t), rows, Op.SUM)


# ---- tensors that share memory, or are unlike their neighbours ----


def uneven_all_gather(k: Kit) -> None:
    shapes = [(rank * 3, 2) for rank in range(k.world)]
    outs = [k.target(shape) for shape in shapes]
    k.run(dist.all_gather, outs, k.source(k.values(k.rank, shapes[k.rank])))
    for rank, out in enumerate(outs):
        k.same(out, k.values(rank, shapes[rank]), rank)


def inputs_within_outputs(k: Kit) -> None:
    rows, here = all_rows(k), slice(k.rank, k.rank + 1)
    outs = [k.in_place(rows[k.rank]) for _ in range(k.world)]
    k.run(dist.all_gather, outs, outs[k.rank])
    k.same(torch.stack(outs), torch.stack(rows), "all_gather")

    for at in (here, slice(0, 1), slice(k.world - 1, k.world)):
        out = k.target((k.world, *k.shape))
        out.detach()[at].copy_(rows[k.rank])
        k.run(dist.all_gather_single, out, out[at])
        k.same(out, torch.stack(rows), "all_gather_single")

    outs = [k.in_place(rows[k.rank]) for _ in range(k.world)] if k.rank == 0 else []
    k.run(dist.gather, outs[0] if outs else k.source(rows[k.rank]), outs or None, 0)
    if outs:
        k.same(torch.stack(outs), torch.stack(rows), "gather")

    parts = [k.in_place(row) for row in rows] if k.rank == 0 else []
    out = parts[-1] if parts else k.target()
    k.run(dist.scatter, out, parts or None, 0)
    k.same(out, rows[k.rank], "scatter")

    wide = all_rows(k, (k.world, *k.shape))
    for at in (here, slice(0, 1), slice(k.world - 1, k.world)):
        whole = k.in_place(wide[k.rank])
        k.run(dist.reduce_scatter_single, whole[at], whole)
        check(k, whole[at], [row[here] for row in wide], Op.SUM)
    parts = [k.in_place(part) for part in wide[k.rank]]
    k.run(dist.reduce_scatter, parts[0], parts)
    check(k, parts[0], [row[k.rank] for row in wide], Op.SUM)

    whole = k.in_place(wide[k.rank])
    k.run(dist.all_to_all_single, whole, whole)
    k.same(whole, torch.stack([row[k.rank] for row in wide]), "all_to_all_single")
    parts = [k.in_place(part) for part in wide[k.rank]]
    k.run(dist.all_to_all, parts, parts)
    k.same(torch.stack(parts), torch.stack([row[k.rank] for row in wide]), "all_to_all")


def expanded_inputs(k: Kit) -> None:
    def row(rank: int) -> Tensor:
        return k.values(rank, (1, 40)).expand(30, 40)

    outs = [k.target((30, 40)) for _ in range(k.world)]
    k.run(dist.all_gather, outs, k.here(row(k.rank)))
    for rank, out in enumerate(outs):
        k.same(out, row(rank))
    out = k.target((30, 40))
    parts = [k.here(row(rank)) for rank in range(k.world)] if k.rank == 0 else None
    k.run(dist.scatter, out, parts, 0)
    k.same(out, row(k.rank))


def conjugated(k: Kit) -> None:
    """Views that torch computes only when they are read; the group sees them when asked itself."""
    rows = all_rows(k)
    group: Any = k.group or dist.group.WORLD
    t = k.here(rows[k.rank].clone()).conj()
    group.allreduce([t]).wait()
    k.near(t, reduced(rows, Op.SUM).conj().resolve_conj())
    t = k.here(rows[k.rank].clone()).conj().imag  # its negative bit is set
    group.allreduce([t]).wait()
    k.near(t, -reduced(rows, Op.SUM).imag)


def inference(k: Kit) -> None:
    rows = all_rows(k)
    with torch.inference_mode():
        outs = [k.here(k.values(99)) for _ in range(k.world)]
        work = dist.all_gather(outs, k.here(rows[k.rank]), group=k.group, async_op=True)
        work.get_future().wait()
    k.same(torch.stack(outs), torch.stack(rows))


def versions(k: Kit) -> None:
    """What autograd has saved isn't declared stale by filling outputs of no concern to it."""
    t = k.here(k.values(k.rank)).requires_grad_()
    doubled = (t * t).sum()
    k.run(dist.all_reduce, t.detach().clone(), Op.SUM)
    doubled.backward()
    assert t.grad is not None
    k.same(t.grad, 2 * k.values(k.rank))


def objects(k: Kit) -> None:
    mine = {"rank": k.rank, "text": "x" * 1000 * k.rank}
    everyone = [{"rank": rank, "text": "x" * 1000 * rank} for rank in range(k.world)]
    found: list[Any] = [None] * k.world
    dist.all_gather_object(found, mine, group=k.group)
    assert found == everyone
    found = [None] * k.world
    dist.gather_object(mine, found if k.rank == 0 else None, 0, group=k.group)
    assert k.rank or found == everyone
    listed = [mine, k.rank]
    dist.broadcast_object_list(listed, k.world - 1, group=k.group)
    assert listed == [everyone[-1], k.world - 1]
    got: list[Any] = [None]
    dist.scatter_object_list(got, everyone if k.rank == 0 else None, 0, group=k.group)
    assert got == [mine]
    if k.world > 1 and k.rank < 2:
        sent = [mine, "second"]
        if k.rank == 0:
            dist.send_object_list(sent, 1, group=k.group)
        else:
            dist.recv_object_list(sent, 0, group=k.group)
            assert sent == [everyone[0], "second"]


def sparse(k: Kit) -> None:
    """Each rank has entries of its own, some of them doubled, one rank none."""
    from torch._C._distributed_c10d import _make_nccl_premul_sum

    def tensor(rank: int, dense: tuple[int, ...]) -> Tensor:
        count = 0 if rank == 1 else 40
        places = data((2, count), torch.uint8, rank).long() % 13
        values = data((count, *dense), torch.float32, rank).to(k.dtype)
        return torch.sparse_coo_tensor(places, values, (13, 17, *dense)).to(k.device)

    def total(dense: tuple[int, ...], scale: float = 1.0) -> Tensor:
        rows = [tensor(rank, dense).to_dense() for rank in range(k.world)]
        return sum(rows[1:], rows[0]).mul(scale).to(k.dtype)

    for dense in ((), (5,), (3, 2)):
        t = tensor(k.rank, dense)
        k.run(dist.all_reduce, t)
        assert t.is_sparse
        assert t.is_coalesced()
        k.same(t.to_dense(), total(dense))
    if k.dtype in FLOATS:
        t = tensor(k.rank, (2,)).requires_grad_()
        k.run(dist.all_reduce, t, Op.AVG)
        k.near(t.to_dense(), total((2,), 1 / k.world))
        if SAYS_FACTORS:
            t = tensor(k.rank, (2,))
            k.run(dist.all_reduce, t, _make_nccl_premul_sum(0.5))
            k.same(t.to_dense(), total((2,), 0.5))
    empty = torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0, dtype=k.dtype), (7,))
    empty = empty.to(k.device)
    k.run(dist.all_reduce, empty)
    k.same(empty.to_dense(), torch.zeros(7, dtype=k.dtype))


def barriers(k: Kit) -> None:
    k.run(dist.barrier)
    group: Any = k.group or dist.group.WORLD
    group.monitored_barrier()
    if TORCH >= (2, 14):
        dist.monitored_barrier(k.group)


ODD: tuple[tuple[Callable[[Kit], None], tuple[torch.dtype, ...]], ...] = (
    (ring, (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.float8_e5m2)),
    (premultiplied, (*FLOATS, torch.complex64)),
    (extremes, FLOATS),
    (coalescing_manager, (torch.float32, torch.int16, torch.bool)),
    (coalesced, (torch.float32, torch.uint32)),
    (functional, (torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool)),
    (uneven_all_gather, (torch.float32, torch.uint8, torch.complex64, torch.float8_e4m3fn)),
    (inputs_within_outputs, (torch.float32, torch.int64)),
    (expanded_inputs, (torch.float32, torch.int16)),
    (conjugated, (torch.complex64,)),
    (inference, (torch.float32, torch.int32)),
    (versions, (torch.float32,)),
    (objects, (torch.uint8,)),
    (sparse, (*FLOATS, torch.int64, torch.int16)),
    (barriers, (torch.uint8,)),
)
