"""A group that is asked for by an accelerator's name is refused when it is made."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

import lossycoll
from lossycoll.backend.devices import ServedDevices, check_device
from lossycoll.runtime.engine.failures import Where


def store_for(device: str, base: dist.Store) -> dist.Store:
    """As torch makes it."""
    return PrefixStore(f"{device}/", PrefixStore("0/", base))


def test_an_accelerator_is_refused_and_no_key_is_left() -> None:
    base = HashStore()
    with pytest.raises(lossycoll.UnsupportedError, match=r"rank 1/2: backend xpu:lossy .*\.cpu"):
        check_device(store_for("xpu", base), 1, 2)
    keys = base.num_keys()
    check_device(store_for("cpu", base), 1, 2)
    check_device(store_for("cuda", base), 1, 2)
    check_device(store_for("a device that isn't known", base), 1, 2)
    assert base.num_keys() == keys


def test_a_store_that_says_nothing_is_no_error() -> None:
    check_device(HashStore(), 0, 1)


def test_init_process_group_raises_it() -> None:
    with pytest.raises(lossycoll.UnsupportedError, match=r"xpu:lossy was asked for.*'lossy'"):
        dist.init_process_group("xpu:lossy", store=HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", ["lossy", "cpu:lossy", "cpu:lossy,cuda:nccl", "cuda:lossy"])
def test_what_serves_cpu_tensors_is_made(backend: str) -> None:
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()


def test_tensors_of_another_backends_device_are_refused() -> None:
    """torch would hand them over in silence."""
    dist.init_process_group("cpu:gloo,cuda:lossy", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(lossycoll.UnsupportedError, match=r"on cpu, .* backend 'gloo'"):
            dist.all_reduce(torch.ones(3))
    finally:
        dist.destroy_process_group()


def test_what_a_group_serves_is_asked_once_for_each_device() -> None:
    asked: list[str] = []

    def configured() -> str:
        asked.append("cpu:lossy,cuda:nccl")
        return asked[-1]

    served = ServedDevices(Where(0, 2), configured)
    for _ in range(3):
        served.check("all_reduce", [torch.ones(1)])
    assert len(asked) == 1
    with pytest.raises(lossycoll.UnsupportedError, match=r"on meta, cpu|on cpu, meta"):
        served.check("all_reduce", [torch.ones(1), torch.ones(1, device="meta")])
