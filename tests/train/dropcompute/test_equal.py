"""With nothing dropped, DropCompute is DDP with gradient accumulation, bit for bit.

A lossy group of three ranks adds what comes as it comes, so there DDP isn't equal to itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from lossycoll.train.dropcompute.averaging import _GradientOrder
from tests.support.dropcompute_cases import Shuffled, dropping, inputs_of, loss_of
from tests.support.harness import init, run_good
from tests.support.sharded_cases import sharded

M, STEPS, WORLD = 3, 3, 3
SMALL_BUCKETS = {"bucket_cap_mb": 0.002}
"""Several, so that the order in which gradients are ready decides what is in them."""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "half": {"hook": True},
}


class Buffered(Shuffled):
    """Its buffers are rank 0's at the beginning of each step."""

    def __init__(self, *, partly: bool = False) -> None:
        super().__init__(torch.float32, partly=partly)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(super().forward(x))
        return out


def train_ddp(rank: int, kind: str, group: Any, dropping_none: bool) -> list[Tensor]:
    """The gradients of all steps, and the parameters and buffers in the end."""
    given = dict(KINDS[kind])
    hook = given.pop("hook", False)
    if not dropping_none:
        # DDP fails when the first pass of a static graph is one of no_sync.
        given.pop("static_graph", None)
    model = Buffered(partly=kind == "unused")
    ddp = DistributedDataParallel(model, process_group=group, **SMALL_BUCKETS, **given)
    if hook:
        ddp.register_comm_hook(group, fp16_compress_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    drop = dropping(ddp, M, 99.0) if dropping_none else None
    found: list[Tensor] = []
    for step in range(STEPS):
        xs = [inputs_of(rank, step, number, torch.float32) for number in range(M)]
        if drop is not None:
            for x in drop(iter(xs)):
                (loss_of(ddp, x) / M).backward()
        else:
            with ddp.no_sync():
                for x in xs[:-1]:
                    (loss_of(ddp, x) / M).backward()
            (loss_of(ddp, xs[-1]) / M).backward()
        found += [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found + [t.detach().clone() for t in ddp.state_dict().values()]


def train_sharded(rank: int, group: Any, dropping_none: bool) -> list[Tensor]:
    model = Shuffled(torch.float32, partly=True)
    optimizer = sharded(model.parameters(), torch.optim.AdamW, group, lr=0.1)
    drop = dropping(optimizer, M, 99.0) if dropping_none else None
    found: list[Tensor] = []
    for step in range(STEPS):
        xs = [inputs_of(rank, step, number, torch.float32) for number in range(M)]
        if drop is not None:
            for x in drop(xs):
                (loss_of(model, x) / M).backward()
        else:
            with optimizer.no_sync():
                for x in xs[:-1]:
                    (loss_of(model, x) / M).backward()
            (loss_of(model, xs[-1]) / M).backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        found += [parameter.detach().clone() for parameter in model.parameters()]
    return found


def train_all(rank: int, world: int) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """By name: what DDP (or a ShardedOptimizer alone) comes to, and what DropCompute does."""
    torch.set_num_threads(1)
    init()
    gloo = dist.new_group(backend="gloo")
    pairs = {name: dist.new_group([0, 1], backend=name) for name in ("gloo", "lossy")}
    out: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def both(name: str, train: Any, *given: Any) -> None:
        out[name] = train(rank, *given, False), train(rank, *given, True)

    for kind in KINDS:
        both(f"gloo {kind}", train_ddp, kind, gloo)
        if rank < 2 and kind in ("plain", "static"):
            both(f"pair gloo {kind}", train_ddp, kind, pairs["gloo"])
        if rank < 2 and kind in ("views", "unused", "half"):
            both(f"pair lossy {kind}", train_ddp, kind, pairs["lossy"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_GradientOrder, "_note", lambda *given: None)
        both("unlike, gloo plain", train_ddp, "plain", gloo)
    both("close, lossy plain", train_ddp, "plain", None)
    with lossycoll.reliable():
        both("close, lossy reliable", train_ddp, "unused", None)
        if rank < 2:
            both("pair lossy reliable", train_ddp, "plain", pairs["lossy"])
    both("gloo sharded", train_sharded, gloo)
    if rank < 2:
        both("pair lossy sharded", train_sharded, pairs["lossy"])
    dist.barrier()
    dist.destroy_process_group()
    return out


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, tuple[list[Tensor], list[Tensor]]]]:
    return run_good(train_all, WORLD, {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_LOSSY_MIN_BYTES": "0"})


def test_with_nothing_dropped_it_is_ddp_bit_for_bit(ranks: Any) -> None:
    assert [len(found) for found in ranks] == [16, 16, 9]
    for rank, found in enumerate(ranks):
        for name, (theirs, mine) in found.items():
            assert len(mine) == len(theirs) > 10, name
            if name.startswith(("close", "unlike")):
                # Terms of the order of 1 are added in the order in which they arrive, and before
                # a batch norm they cancel: a bias's gradient is nothing but what is rounded off.
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
                continue
            for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                assert torch.equal(a, b), (rank, name, index, (a - b).abs().max())
                assert torch.equal(torch.signbit(a), torch.signbit(b)), (rank, name, index)


def test_the_comparison_has_power(ranks: Any) -> None:
    """Other buckets, of another order in which gradients are ready, round otherwise."""
    wrong = ranks[0]["unlike, gloo plain"]
    assert not all(torch.equal(a, b) for a, b in zip(*wrong, strict=True))
