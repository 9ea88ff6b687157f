"""torch's builtin hooks of DDP, which call from C++."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lossycoll import UnsupportedError
from tests.support.harness import Ranks, init, run_good

SIZES = (8, 40_000)
"""One bucket that gloo serves, and one that the engine does."""


def rank_hook(rank: int, world: int) -> list[tuple[int, float, str]]:
    """By size: the mean gradient and its dtype, after several steps with FP16_COMPRESS."""
    init(timeout=30)
    found = []
    for dtype, builtin in ((torch.float32, True), (torch.float16, False)):
        for size in SIZES:
            model = DistributedDataParallel(torch.nn.Linear(1, size, bias=False, dtype=dtype))
            if builtin:
                model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
            for _ in range(3):
                model.zero_grad()
                model(torch.full((1, 1), rank + 1.0, dtype=dtype)).sum().backward()
            (weight,) = model.parameters()
            assert weight.grad is not None
            assert bool((weight.grad == weight.grad[0]).all())
            found.append((size, float(weight.grad[0]), str(weight.grad.dtype)))
    dist.destroy_process_group()
    return found


def test_fp16_compress_gives_the_mean() -> None:
    wanted = [(size, 1.5, kind) for kind in ("torch.float32", "torch.float16") for size in SIZES]
    assert run_good(rank_hook, 2) == [wanted, wanted]


def rank_dies(rank: int, world: int) -> str:
    """The error of rank 0's backward pass after rank 1 has died in its own."""
    init(timeout=30)
    model = DistributedDataParallel(torch.nn.Linear(1, SIZES[1], bias=False))
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    loss = model(torch.ones(1, 1)).sum()
    dist.barrier()
    if rank == 1:
        os._exit(7)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_an_error_reaches_the_backward_pass() -> None:
    with Ranks(rank_dies, 2) as ranks:
        survivor, dead = ranks.collect(60)
    assert dead.code == 7
    assert "lost rank 1" in survivor.value, survivor


def rank_on_device(rank: int, world: int) -> tuple[str, float, float, float]:
    """Of a fake device: the refusal of FP16_COMPRESS, and means of DDP with other hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    from tests.support import fake_device

    fake_device.install(seed=rank)
    init(timeout=30)

    def ddp(dtype: torch.dtype = torch.float32) -> DistributedDataParallel:
        return DistributedDataParallel(torch.nn.Linear(1, SIZES[1], bias=False, dtype=dtype))

    def gradient(model: DistributedDataParallel) -> float:
        (weight,) = model.parameters()
        model(torch.full((1, 1), rank + 1.0, dtype=weight.dtype)).sum().backward()
        assert weight.grad is not None
        assert bool((weight.grad == weight.grad[0]).all())
        return float(weight.grad[0])

    model = ddp()
    with pytest.raises(UnsupportedError) as caught:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    builtin = ddp()
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    means = gradient(model), gradient(builtin), gradient(ddp(torch.float16))
    dist.barrier()
    fake_device.synchronize()
    dist.destroy_process_group()
    return str(caught.value), *means


def test_on_a_device_fp16_compress_is_refused_by_name() -> None:
    for said, *means in run_good(rank_on_device, 2, {"LOSSYCOLL_LOG": "off"}):
        assert "FP16_COMPRESS doesn't work over lossy with parameters on" in said
        assert "register torch's fp16_compress_hook" in said
        assert means == [1.5, 1.5, 1.5]
