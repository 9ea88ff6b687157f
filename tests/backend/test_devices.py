"""A group that is asked for by an accelerator's name is refused when it is made."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

import lossycoll
from lossycoll.backend.devices import check_device


def store_for(device: str, base: dist.Store) -> dist.Store:
    """As torch makes it."""
    return PrefixStore(f"{device}/", PrefixStore("0/", base))


def test_an_accelerator_is_refused_and_no_key_is_left() -> None:
    base = HashStore()
    with pytest.raises(lossycoll.UnsupportedError, match=r"rank 1/2: backend cuda:lossy .*\.cpu"):
        check_device(store_for("cuda", base), 1, 2)
    keys = base.num_keys()
    check_device(store_for("cpu", base), 1, 2)
    check_device(store_for("a device that isn't known", base), 1, 2)
    assert base.num_keys() == keys


def test_a_store_that_says_nothing_is_no_error() -> None:
    check_device(HashStore(), 0, 1)


@pytest.mark.parametrize("backend", ["cuda:lossy", "cpu:gloo,cuda:lossy"])
def test_init_process_group_raises_it(backend: str) -> None:
    with pytest.raises(lossycoll.UnsupportedError, match=r"cuda:lossy was asked for.*'lossy'"):
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", ["lossy", "cpu:lossy", "cpu:lossy,cuda:nccl"])
def test_what_serves_cpu_tensors_is_made(backend: str) -> None:
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
