"""Calls that can't be served: each is refused at once, on the rank that makes it, and the group
goes on. ``refusals`` yields (name, call, error).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lossycoll import UnsupportedError
from tests.support.surface_kit import Op
from tests.support.versions import TORCH

Refusal = tuple[str, Callable[[], Any], type[Exception]]


def _roots(pg: Any, world: int) -> Iterator[Refusal]:
    t = torch.zeros(4)
    lists = [torch.zeros(4) for _ in range(world)]
    for root in (world, -1):
        for name, options, call in (
            ("broadcast", dist.BroadcastOptions(), lambda o: pg.broadcast([t], o)),
            ("reduce", dist.ReduceOptions(), lambda o: pg.reduce([t], o)),
            ("gather", dist.GatherOptions(), lambda o: pg.gather([], [t], o)),
            ("scatter", dist.ScatterOptions(), lambda o: pg.scatter([t], [], o)),
        ):
            options.rootRank = root
            yield (
                f"{name} root {root}",
                partial(call, options),
                UnsupportedError,
            )
    yield "broadcast from nowhere", lambda: dist.broadcast(t, world + 3), UnsupportedError
    yield "gather to nowhere", lambda: dist.gather(t, None, world + 3), UnsupportedError
    yield "group rank", lambda: dist.broadcast(t, group_src=world), UnsupportedError
    yield "two roots", lambda: dist.broadcast(t, 0, group_src=0), ValueError
    yield "send to itself", lambda: dist.send(t, dist.get_rank()), ValueError
    yield "no root's list", lambda: dist.gather(t, lists, (dist.get_rank() + 1) % world), ValueError


def _lists(pg: Any, rank: int, world: int) -> Iterator[Refusal]:
    t = torch.zeros(4)
    right = [torch.zeros(4) for _ in range(world)]
    wrong: dict[str, list[torch.Tensor]] = {
        "short": right[1:],
        "long": [*right, t],
        "empty": [],
        "of another size": [torch.zeros(5)] * world,
        "of another type": [torch.zeros(4, dtype=torch.int32)] * world,
        "of two types": [torch.zeros(4, dtype=torch.float64), *right[1:]],
    }
    for how, parts in wrong.items():
        torch_refuses = how in ("of another type", "of two types")
        error: type[Exception] = ValueError if torch_refuses else UnsupportedError
        rooted = ValueError if how == "empty" else error
        yield f"all_gather {how}", partial(dist.all_gather, parts, t), error
        yield f"gather {how}", partial(dist.gather, t, parts, rank), rooted
        yield f"scatter {how}", partial(dist.scatter, t, parts, rank), rooted
        yield f"reduce_scatter {how}", partial(dist.reduce_scatter, t, parts), error
        yield f"pg.allgather {how}", partial(pg.allgather, [parts], [t]), UnsupportedError
        yield f"pg.scatter {how}", partial(_scatter, pg, t, parts, rank), UnsupportedError
        if how != "of another size":
            yield f"all_to_all {how}", partial(dist.all_to_all, parts, right), error
            yield f"pg.alltoall {how}", partial(pg.alltoall, parts, right), UnsupportedError
    yield "several tensors", lambda: pg.allreduce([t, t]), UnsupportedError
    yield "no tensor", lambda: pg.allreduce([]), UnsupportedError
    yield "several lists", lambda: pg.allgather([right, right], [t, t]), UnsupportedError
    yield "not a list", lambda: dist.all_gather(t, t), TypeError
    yield "not a tensor", lambda: dist.all_reduce([1.0]), TypeError


def _scatter(pg: Any, out: torch.Tensor, parts: list[torch.Tensor], rank: int) -> Any:
    options = dist.ScatterOptions()
    options.rootRank = rank
    return pg.scatter([out], [parts], options)


def _shapes(pg: Any, world: int) -> Iterator[Refusal]:
    zeros = torch.zeros
    t = zeros(2 * world)
    bad = UnsupportedError
    yield (
        "all_gather_single short",
        lambda: dist.all_gather_single(zeros(5 * world - 1), zeros(5)),
        bad,
    )
    yield "reduce_scatter_single long", lambda: dist.reduce_scatter_single(zeros(3), t), bad
    yield (
        "all_gather_single type",
        lambda: dist.all_gather_single(zeros(5 * world), zeros(5, dtype=torch.int32)),
        bad,
    )
    for name, out, into in (
        ("sum", [1] * world, [3] * world),
        ("negative", [-1, 2 * world + 1, *[0] * (world - 2)], [2] * world),
        ("length", [2 * world], [2] * world),
    ):
        yield (
            f"all_to_all_single splits {name}",
            partial(dist.all_to_all_single, zeros(2 * world), t, out, into),
            bad,
        )
    yield "all_to_all_single odd", lambda: dist.all_to_all_single(zeros(2 * world + 1), t), bad
    yield "all_to_all_single 0-d", lambda: dist.all_to_all_single(zeros(()), zeros(())), bad
    yield (
        "all_to_all_single types",
        lambda: pg.alltoall_base(t.int(), t, [], [], dist.AllToAllOptions()),
        bad,
    )


def _tensors(pg: Any, world: int) -> Iterator[Refusal]:
    bad = UnsupportedError
    meta = torch.zeros(4, device="meta")
    yield "meta", lambda: dist.all_reduce(meta), bad
    yield "meta all_gather", lambda: pg.allgather([[meta] * world], [meta]), bad
    expanded = torch.zeros(1).expand(4)
    yield "expanded", lambda: dist.all_reduce(expanded), bad
    yield "expanded broadcast", lambda: dist.broadcast(expanded, 0), bad
    yield "expanded output", lambda: dist.all_gather([expanded] * world, torch.zeros(4)), bad
    coo = torch.eye(4).to_sparse()
    for name, tensor in (("coo", coo), ("csr", torch.eye(4).to_sparse_csr())):
        options = dist.BroadcastOptions()
        yield (
            f"{name} broadcast",
            partial(pg.broadcast, [tensor], options),
            bad,
        )
        yield f"{name} all_gather", partial(pg.allgather, [[tensor] * world], [tensor]), bad
    yield "csr all_reduce", lambda: pg.allreduce([torch.eye(4).to_sparse_csr()]), bad
    yield "coo MAX", lambda: dist.all_reduce(coo, Op.MAX), bad
    yield "coo bool", lambda: dist.all_reduce(coo.bool()), bad
    quantized = torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8)
    yield "quantized", lambda: dist.broadcast(quantized, 0), bad


def _operations(pg: Any, world: int) -> Iterator[Refusal]:
    from torch._C._distributed_c10d import _make_nccl_premul_sum

    cases: list[tuple[torch.dtype, tuple[Any, ...]]] = [
        (torch.float32, (Op.BAND, Op.BOR, Op.BXOR)),
        (torch.bfloat16, (Op.BAND,)),
        (torch.int64, (_make_nccl_premul_sum(2.0),)),
        (torch.uint16, (_make_nccl_premul_sum(2.0),)),
        (torch.bool, (Op.AVG,)),
        (torch.float8_e5m2, (Op.SUM, Op.MAX, Op.AVG)),
    ]
    for dtype, operations in cases:
        for op in operations:
            t = torch.zeros(4).to(dtype)
            several = [t.clone() for _ in range(world)]
            wide = torch.zeros(4 * world).to(dtype)
            for name, call in (
                ("all_reduce", partial(dist.all_reduce, t, op)),
                ("reduce", partial(dist.reduce, t, 0, op)),
                ("reduce_scatter", partial(dist.reduce_scatter, t, several, op)),
                ("single", partial(dist.reduce_scatter_single, t, wide, op)),
            ):
                yield f"{name} {op} {dtype}", call, UnsupportedError
    t = torch.zeros(4, dtype=torch.complex64)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(Op.MAX)
    yield "complex MAX", lambda: dist.all_reduce(t, Op.MAX), ValueError
    yield "pg complex MAX", lambda: pg.allreduce([t], options), UnsupportedError


def _groups(pg: Any, world: int) -> Iterator[Refusal]:
    """What torch itself refuses of every backend on the CPU, and what is ours of it."""
    if TORCH < (2, 15):  # which wants an accelerator for it
        yield "split_group", lambda: dist.split_group(split_ranks=[[0]]), RuntimeError
    yield "pg.split_group", lambda: pg.split_group([0, world]), UnsupportedError
    yield "shrink_group", lambda: dist.shrink_group([1]), TypeError
    yield "default subgroups", dist.new_subgroups, ValueError
    if TORCH < (2, 14):  # which has it for gloo alone
        yield "monitored_barrier", dist.monitored_barrier, ValueError


def refusals(pg: Any, rank: int, world: int) -> Iterator[Refusal]:
    yield from _roots(pg, world)
    yield from _lists(pg, rank, world)
    yield from _shapes(pg, world)
    yield from _tensors(pg, world)
    yield from _operations(pg, world)
    yield from _groups(pg, world)
