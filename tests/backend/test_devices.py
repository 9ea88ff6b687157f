"""A group that is asked for by an accelerator's name is refused when it is made."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore

import lossycoll
from lossycoll.backend.devices import HAS_BACKENDS, ServedDevices, check_device
from lossycoll.runtime.engine.failures import Where
from tests.support.harness import init, run_good


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


def test_tensors_of_a_backend_that_cant_be_had_are_refused() -> None:
    """torch would hand them over in silence."""
    dist.init_process_group("cuda:lossy,cpu:ucc", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(lossycoll.UnsupportedError, match=r"'cuda:lossy,cpu:ucc'.* 'ucc'"):
            dist.all_reduce(torch.ones(3))
    finally:
        dist.destroy_process_group()


def rank_hands_on(rank: int, world: int) -> tuple[list[float], int, str]:
    """Every call of CPU tensors, in a group that has gloo for them."""
    init(backend="cpu:gloo,cuda:lossy")
    other, found = 1 - rank, []

    def note(*tensors: torch.Tensor) -> None:
        found.extend(float(t.sum()) for t in tensors)

    own = torch.full((4,), rank + 1.0)
    t = own.clone()
    work = dist.all_reduce(t, async_op=True)
    assert work is not None
    work.wait()
    note(t)
    t = own.clone()
    dist.broadcast(t, 1)
    note(t)
    t = own.clone()
    dist.reduce(t, 0)
    found.append(float(t.sum()) if rank == 0 else 12.0)
    rows = [torch.empty(4) for _ in range(world)]
    dist.all_gather(rows, own)
    note(*rows)
    whole = torch.empty(8)
    dist.all_gather_into_tensor(whole, own)
    note(whole)
    dist.gather(own, rows if rank == 0 else None, 0)
    dist.scatter(t, rows if rank == 0 else None, 0)
    found.append(float(t.sum()) - 4 * rank)
    half = torch.empty(2)
    dist.reduce_scatter_tensor(half, own)
    note(half)
    out = torch.empty(4)
    dist.all_to_all_single(out, own)
    note(out)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, own, other), dist.P2POp(dist.irecv, t, other)]
    ):
        work.wait()
    found.append(float(t.sum()) + 4 * rank)
    group: Any = dist.group.WORLD
    split = group.split_group([0, 1])
    split.allreduce([own]).wait()
    before = lossycoll.stats().operations + split.lossy_stats().operations
    dist.barrier()
    name = type(group._get_backend(torch.device("cpu"))).__name__
    dist.destroy_process_group()
    return found, before, name


def test_tensors_of_another_backends_device_go_there() -> None:
    """torch hands them all to the first that is a process group."""
    values = run_good(rank_hands_on, 2)
    for found, operations, name in values:
        assert found == [12.0, 8.0, 12.0, 4.0, 8.0, 12.0, 4.0, 6.0, 6.0, 8.0]
        assert operations == 0, "lossy served some"
        assert name == "ProcessGroupGloo"


def test_a_backend_that_was_not_made_in_time_is_not_tried_again() -> None:
    """Ranks would pair with others' first try."""
    served = ServedDevices(Where(0, 2), str, HashStore(), timedelta(seconds=0.2))
    errors = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"timeout|timed out") as caught:
            served.delegate("gloo", "cpu:gloo,cuda:lossy")
        errors.append(caught.value)
    assert errors[0] is errors[1], "it was tried again"
    assert served._made.get("gloo") is None
    served.close()
    with pytest.raises(lossycoll.ClosedError, match="has ended"):
        served.delegate("gloo", "cpu:gloo,cuda:lossy")


def rank_abuses(rank: int, world: int) -> tuple[str, str]:
    """What the other backend doesn't have, and what comes after an abort."""
    init(backend="cpu:gloo,cuda:lossy")
    group: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(1))
    got = torch.zeros(2)
    told = []
    for call in (
        lambda: group.allgather_into_tensor_coalesced([got], [torch.ones(1)]).wait(),
        lambda: (group.abort(), dist.all_reduce(torch.ones(1))),
    ):
        try:
            call()
            told.append(str(got.tolist()))
        except lossycoll.LossyError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told[0], told[1]


def test_what_the_other_backend_cannot_do_is_said() -> None:
    for lacks, ended in run_good(rank_abuses, 2, {"LOSSYCOLL_LOG": "off"}):
        if hasattr(dist.ProcessGroupGloo, "all_gather_single_coalesced"):
            assert lacks == "[1.0, 1.0]", "torch 2.15's gloo has the call"
        else:
            assert "all_gather" in lacks
            assert "ProcessGroupGloo, which has no such call; use a group of 'lossy'" in lacks
        assert ended.startswith("ClosedError")


def test_what_a_group_serves_is_asked_once_for_each_device() -> None:
    asked: list[str] = []

    def configured() -> str:
        asked.append("cpu:lossy,cuda:nccl")
        return asked[-1]

    served = ServedDevices(Where(0, 2), configured, HashStore(), timedelta(seconds=1))
    for _ in range(3):
        served.check("all_reduce", [torch.ones(1)])
    assert len(asked) == 1
    with pytest.raises(lossycoll.UnsupportedError, match=r"on meta, cpu|on cpu, meta"):
        served.check("all_reduce", [torch.ones(1), torch.ones(1, device="meta")])


def rank_properties(rank: int, world: int) -> dict[str, Any]:
    init(timeout=77.0)
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    of_torch = next(one for one in type(backend).__mro__ if one.__module__.startswith("torch."))
    found: dict[str, Any] = {}
    # An endless recursion is an error soon, and not the end of the process.
    sys.setrecursionlimit(300)
    for name, value in vars(of_torch).items():
        if isinstance(value, property):
            try:
                found[name] = getattr(backend, name)
            except RuntimeError as error:
                found[name] = f"{type(error).__name__}: {error}"
    if "options" in found:
        options = found["options"]
        found["options"] = options.backend, options._timeout, options.global_ranks_in_group
    return found


@pytest.mark.skipif(not HAS_BACKENDS, reason="before torch 2.14 Python can't make a backend")
def test_torch_gets_each_property_of_its_backends() -> None:
    """torch asks Python for some of them, which may hand the question back to torch."""
    for found in run_good(rank_properties, 2):
        assert "supports_splitting" in found
        assert not [text for text in found.values() if "RecursionError" in str(text)]
        assert found.get("options") in (None, ("lossy", timedelta(seconds=77), [0, 1]))
