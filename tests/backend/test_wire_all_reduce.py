"""wire_allreduce_: one call after a layer that is split by rows."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lossycoll
from tests.support.harness import init, run_good

ENV = {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_LIVENESS": "30", "LOSSYCOLL_LINK": "udp"}


def rank_reduces(rank: int, world: int) -> dict[str, Any]:
    init()
    out: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        draw = torch.Generator().manual_seed(7)
        everyone = torch.randn(world, 3, 333, generator=draw).to(dtype)
        for wire, how in (("int8", {}), ("int4", {"wire_group": 32}), ("same", {})):
            mine = everyone[rank].clone()
            assert lossycoll.wire_allreduce_(mine, wire, **how) is mine
            off = (mine.float() - everyone.float().sum(0)).abs().max().item()
            out[f"{dtype} {wire}"] = off, mine.view(torch.uint8).numpy().tobytes()
    average = torch.full((7, 3), float(rank))
    lossycoll.wire_allreduce_(average, "int6", dist.group.WORLD, average=True)
    assert average.unique().tolist() == [(world - 1) / 2], "groups of one number are exact"
    for tensor, text in (
        (torch.ones(5, dtype=torch.int64), "of torch.int64, wanted dense float32"),
        (torch.ones(5, dtype=torch.float64), "of torch.float64, wanted dense float32"),
        (torch.ones(5).to_sparse(), "of torch.sparse_coo, wanted dense float32"),
        (torch.ones(5, requires_grad=True), "torch.no_grad"),
    ):
        with pytest.raises(lossycoll.UnsupportedError, match=text) as caught:
            lossycoll.wire_allreduce_(tensor)
        assert f"rank {rank}/{world}: " in str(caught.value)
    with pytest.raises(lossycoll.OptionError, match="option wire is 'int9'"):
        lossycoll.wire_allreduce_(torch.ones(5), "int9")
    nobody = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(lossycoll.UnsupportedError, match="got one of backend 'none'"):
        lossycoll.wire_allreduce_(torch.ones(5), "int8", nobody)
    dist.destroy_process_group()
    return out


def test_each_rank_has_the_same_bits_of_the_sum() -> None:
    ranks = run_good(rank_reduces, 3, ENV)
    assert ranks[0] == ranks[1] == ranks[2]
    off = {name: how for name, (how, _) in ranks[0].items()}
    for dtype in ("torch.float32", "torch.bfloat16"):
        assert off[f"{dtype} same"] < off[f"{dtype} int8"] < off[f"{dtype} int4"] < 1.5
    assert off["torch.float32 same"] < 1e-5


def rank_layer(rank: int, world: int) -> float:
    """A layer that torch splits by rows, with the reduction as a hook."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    del rank
    init()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32))
    x = torch.randn(16, 64)
    with torch.no_grad():
        want = model(x)
        mesh = init_device_mesh("cpu", (world,))
        parallelize_module(model, mesh, {"0": RowwiseParallel(output_layouts=Partial())})
        model[0].register_forward_hook(lambda _, args, out: lossycoll.wire_allreduce_(out, "int8"))
        part = x.chunk(world, 1)[dist.get_rank()].contiguous()
        got = model(part)
    sent = lossycoll.stats().bytes_sent
    dist.destroy_process_group()
    assert sent > 0
    return float((got - want).abs().max())


def test_after_a_layer_that_is_split_by_rows() -> None:
    off = run_good(rank_layer, 2, ENV)
    assert off[0] == off[1]
    assert 1e-5 < off[0] < 0.05, os.environ.get("PYTEST_CURRENT_TEST")
