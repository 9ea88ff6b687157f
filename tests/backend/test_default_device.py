"""Calls under torch.set_default_device(): what the group makes for itself lies on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lossycoll
from lossycoll.backend import staging, tensors
from tests.support.harness import EXACT, init, run_good

ELEMENTS = 9_000


def own(rank: int, n: int = ELEMENTS, dtype: torch.dtype = torch.float32) -> Tensor:
    return ((torch.arange(n, device="cpu") + rank) % 100).to(dtype)


def results(rank: int, world: int, group: Any) -> dict[str, list[float]]:
    """What each call makes of tensors of the CPU."""
    found: dict[str, list[float]] = {}
    parts = [torch.empty(ELEMENTS, device="cpu") for _ in range(world)]
    whole = torch.empty(world * ELEMENTS, device="cpu")
    peer, ops = 1 - rank, dist.ReduceOp

    def note(name: str, *tensors: Tensor) -> None:
        found[name] = [value for one in tensors for value in one.flatten()[::1_000].tolist()]

    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for op in (ops.SUM, ops.MAX):
            for _ in range(2):
                tensor = own(rank, dtype=dtype)
                dist.all_reduce(tensor, op, group)
            note(f"all_reduce {dtype} {op}", tensor.float())
    for name in ("broadcast", "reduce"):
        getattr(dist, name)(tensor := own(rank), 0, group=group)
        found[name] = tensor[::1_000].tolist() if name == "broadcast" or rank == 0 else []
    dist.all_gather(parts, own(rank), group)
    note("all_gather", *parts)
    dist.gather(own(rank), parts if rank == 0 else None, 0, group)
    dist.scatter(tensor, parts if rank == 0 else None, 0, group)
    note("scatter", tensor)
    dist.all_gather_single(whole, own(rank), group)
    note("all_gather_single", whole)
    dist.reduce_scatter_single(tensor, whole, group=group)
    note("reduce_scatter_single", tensor)
    dist.all_to_all_single(tensor, own(rank), group=group)
    note("all_to_all_single", tensor)
    splits = [1_000, 3_000] if rank == 0 else [3_000, 2_000]
    uneven = torch.empty(sum(splits), device="cpu")
    dist.all_to_all_single(uneven, own(rank, sum(splits)), splits, splits, group)
    note("all_to_all_single, uneven", uneven)
    dist.all_to_all(parts, [own(rank), own(rank + 1)], group)
    note("all_to_all", *parts)
    sparse = torch.sparse_coo_tensor([[rank, 5]], [1.0, 2.0], (9,), device="cpu")
    dist.all_reduce(sparse, group=group)
    found["sparse"] = sparse.to_dense().tolist()
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, own(rank), peer, group),
            dist.P2POp(dist.irecv, tensor, peer, group),
        ]
    ):
        work.wait()
    note("messages", tensor)
    dist.barrier(group)
    group.monitored_barrier(timedelta(seconds=60))
    with lossycoll.lossy(wire="int8", lossy_min_bytes=0):
        dist.all_reduce(tensor := own(rank), group=group)
    note("encoded", tensor)
    note("wire_allreduce_", lossycoll.wire_allreduce_(own(rank, dtype=torch.bfloat16), group=group))
    group.all_gather_blocks(whole).wait()
    note("all_gather_blocks", whole)
    assert not group.reduce_scatter_blocks(tensor, whole).lost.any()
    note("reduce_scatter_blocks", tensor)
    return found


def rank_calls(rank: int, world: int) -> dict[str, dict[str, list[float]]]:
    init()
    out = {}
    for name, how in (
        ("plain", nullcontext()),
        ("scope", torch.device("meta")),
        ("everywhere", None),
    ):
        if how is None:
            torch.set_default_device("meta")
        with how or nullcontext():
            group = dist.new_group()
            out[name] = results(rank, world, group)
            with_survivors = dist.new_group(pg_options={"on_peer_loss": "continue"})
            out[f"{name}, survivors"] = results(rank, world, with_survivors)
    torch.set_default_device(None)
    dist.destroy_process_group()
    return out


def test_another_default_device_changes_no_result() -> None:
    for found in run_good(rank_calls, 2, EXACT):
        plain = found["plain"]
        assert plain["all_to_all_single"]
        for name, values in found.items():
            assert values == plain, name


def test_a_package_that_is_imported_under_it_has_its_own_buffers() -> None:
    run_good(rank_imports_late, 2, EXACT, fresh=True)


def rank_imports_late(rank: int, world: int) -> None:
    """As a program that has set the device at its top. This module has imported all by now, so
    what it holds is made anew."""
    import importlib

    with torch.device("meta"):
        for module in (tensors, staging):
            importlib.reload(module)
    assert tensors._NOTHING.is_cpu
    assert staging.NOTHING.is_cpu
