"""All-reduces in few bits of tensors on the device, which encodes them (docs/devices.md)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lossycoll
from lossycoll.backend import device_wire
from lossycoll.backend.collectives import ENCODED_GATHER
from lossycoll.backend.device_wire import PACKET, DeviceWire, HostLowBits, Parts
from lossycoll.devices.registry import device_of
from lossycoll.plan import codec
from lossycoll.plan.codec import LowBit
from tests.gpu.checks import Rank, Table
from tests.gpu.fresh_group import fresh_group
from tests.oracle import lowbit
from tests.support.surface_kit import Op

TABLE = Table(init={"pg_options": {"link": "udp"}})
"""Each rank counts as a host of its own."""
SIZES = (1, 127, 300, 1000, 20_000, 70_001)
WIRES: dict[str, dict[str, Any]] = {
    "int8": {},
    "int4": {},
    "int4/int8": {},
    "int5": {"wire_group": 32},
    "int3": {"wire_group": 32, "wire_spikes": 1},
}


@contextmanager
def _of_any_size() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_wire, "LEAST_BYTES", 1)
        yield


def _wire() -> DeviceWire:
    group: Any = dist.group.WORLD
    found: DeviceWire = group._dispatcher.device_wire
    return found


def _needs_codec(rank: Rank) -> None:
    if device_of(torch.empty(1, device=rank.device)).layer.low_bits() is None:
        pytest.skip("nothing encodes floats on this device")


def _rows(rank: Rank, size: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * (one + 1) for one in range(rank.world)]


def _low(encoding: str, **how: int) -> tuple[LowBit, LowBit]:
    name = codec.named(encoding, how.get("wire_group", 128), how.get("wire_spikes", 0))
    first, second = (codec.codec_of(one, "f32").low for one in codec.phases(name))
    assert first is not None
    assert second is not None
    return first, second


def _rounded(how: LowBit, x: np.ndarray) -> np.ndarray:
    """What packets make of a part."""
    pieces = [x[at : at + PACKET] for at in range(0, len(x), PACKET)]
    return np.concatenate(
        [lowbit.decode(how, lowbit.encode(how, one), len(one)) for one in pieces] or [x]
    )


def _wanted(rows: list[Tensor], encoding: str, **how: int) -> Tensor:
    """By the reference: all contributions rounded but an owner's own; then the sums."""
    first, second = _low(encoding, **how)
    parts = Parts.of(rows[0].numel(), len(rows))
    found = []
    for owner in range(len(rows)):
        begin = owner * parts.each
        own = [row.numpy()[begin : begin + parts.each] for row in rows]
        given = [x if r == owner else _rounded(first, x) for r, x in enumerate(own)]
        total = torch.from_numpy(np.stack(given)).sum(0).numpy()
        found.append(torch.from_numpy(_rounded(second, total)))
    return torch.cat(found)


@TABLE.check()
def sums_are_rounded_as_the_format_says(rank: Rank) -> None:
    _needs_codec(rank)
    before = _wire()._calls
    with _of_any_size():
        for wire, how in WIRES.items():
            for size in SIZES:
                rows = _rows(rank, size, seed=size)
                t = rows[rank.rank].to(rank.device, copy=True)
                lossycoll.wire_allreduce_(t, wire, **how)
                want = _wanted(rows, wire, **how)
                assert torch.equal(t.cpu(), want), f"{wire} {how}, {size} elements"
    assert _wire()._calls == before + len(WIRES) * len(SIZES), "the host encoded some"


@TABLE.check()
def means_strides_and_floats_of_two_bytes(rank: Rank) -> None:
    _needs_codec(rank)
    with _of_any_size():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for op in (Op.SUM, Op.AVG):
                rows = _rows(rank, 3000, seed=3)
                whole = torch.zeros(60, 100, dtype=dtype, device=rank.device)
                whole[:, 1::2] = rows[rank.rank].view(60, 50).to(rank.device, dtype)
                with lossycoll.reliable(wire="int8", lossy_min_bytes=0):
                    dist.all_reduce(whole[:, 1::2], op)
                truth = torch.stack([row.to(dtype).float() for row in rows]).sum(0)
                truth = truth / rank.world if op == Op.AVG else truth
                got = whole[:, 1::2].float().cpu().reshape(-1)
                assert (got - truth).abs().max() < 0.1 * rank.world, (dtype, op)
                assert (whole[:, ::2] == 0).all(), "what lies between was written"


@TABLE.check()
def all_ranks_get_the_same_bits(rank: Rank) -> None:
    """Owners too; also rounded at random, where two calls of the same tensors differ."""
    _needs_codec(rank)
    with _of_any_size():
        for rounding in ("nearest", "stochastic"):
            found = []
            for _ in range(2):
                t = _rows(rank, 5000, seed=1)[rank.rank].to(rank.device, copy=True)
                lossycoll.wire_allreduce_(t, "int4", wire_rounding=rounding)
                every = [torch.empty_like(t) for _ in range(rank.world)]
                dist.all_gather(every, t)
                assert all(torch.equal(one, t) for one in every)
                found.append(t.cpu())
            assert torch.equal(*found) == (rounding == "nearest")


@TABLE.check()
def what_is_rounded_at_random_is_unbiased(rank: Rank) -> None:
    _needs_codec(rank)
    rows, calls = _rows(rank, 2000, seed=8), 300
    truth = torch.stack(rows).sum(0).double()
    total, squares = torch.zeros(2000).double(), torch.zeros(2000).double()
    with _of_any_size():
        for _ in range(calls):
            t = rows[rank.rank].to(rank.device, copy=True)
            lossycoll.wire_allreduce_(t, "int3", wire_rounding="stochastic")
            error = t.cpu().double() - truth
            total += error
            squares += error.square()
    mean = total / calls
    spread = (squares / calls - mean.square()).clamp(min=1e-12).sqrt() / calls**0.5
    # An end of a group may lie off its grid, by two units (docs/wire.md), and has no spread.
    units = 4 * rank.world * torch.stack(rows).abs().max() * 2.0**-14
    assert (mean.abs() < 4.5 * spread + units).all(), (mean.abs() / (spread + units)).max()


@TABLE.check()
def calls_overlap_and_futures_tell(rank: Rank) -> None:
    _needs_codec(rank)
    rows = [_rows(rank, 30_000 + 128 * n, seed=n) for n in range(6)]
    tensors = [some[rank.rank].to(rank.device, copy=True) for some in rows]
    with _of_any_size(), lossycoll.reliable(wire="int8", lossy_min_bytes=0):
        works: list[Any] = [dist.all_reduce(t, async_op=True) for t in tensors]
    for n, (work, t, some) in enumerate(zip(works, tensors, rows, strict=True)):
        if n % 2:
            (filled,) = work.get_future().wait()
            assert filled.data_ptr() == t.data_ptr()
        else:
            work.wait()
        assert torch.equal(t.cpu(), _wanted(some, "int8"))
        assert work.is_completed()
        assert work.exception() is None


@TABLE.check()
def groups_that_become_nan_are_counted(rank: Rank) -> None:
    _needs_codec(rank)
    t = torch.ones(4096 * rank.world, device=rank.device)
    if rank.rank == 0:
        t[-1] = float("nan")  # of the last part, which is another rank's
    before = lossycoll.stats().nan_groups
    with _of_any_size():
        lossycoll.wire_allreduce_(t, "int4")
    got = t.cpu()
    assert got[-128:].isnan().all()
    assert (got[:-128] == rank.world).all()
    counted = lossycoll.stats().nan_groups - before
    assert counted == (1 if rank.rank in (0, rank.world - 1) else 0)


@TABLE.check()
def ranks_that_differ_are_told(rank: Rank) -> None:
    _needs_codec(rank)
    t = torch.ones(1000, device=rank.device)

    def differ() -> None:
        lossycoll.wire_allreduce_(t, "int4" if rank.rank else "int8")
        rank.wait_for_device()
        for _ in range(100):
            dist.all_reduce(torch.ones(1000, device=rank.device))

    with _of_any_size(), pytest.raises(lossycoll.MismatchError, match=r"int8.*int4|int4.*int8"):
        differ()
    rank.wait_for_device()
    dist.destroy_process_group()


@TABLE.check()
def a_host_encodes_where_its_device_cannot(rank: Rank) -> None:
    """The others needn't know: the bits are the same."""
    options = {"link": "udp", **({"disable": "device_wire"} if rank.rank else {})}
    with fresh_group(pg_options=options), _of_any_size():
        for wire, how in WIRES.items():
            rows = _rows(rank, 20_000, seed=4)
            t = rows[rank.rank].to(rank.device, copy=True)
            lossycoll.wire_allreduce_(t, wire, **how)
            assert torch.equal(t.cpu(), _wanted(rows, wire, **how)), wire
        t = torch.full((1000 * rank.world,), float("inf"), device=rank.device)
        lossycoll.wire_allreduce_(t, "int8")
        assert t.cpu().isnan().all()
        assert lossycoll.stats().nan_groups > 0
        codec = _wire()._codec_of(device_of(t))
        assert isinstance(codec, HostLowBits) == bool(rank.rank)
    dist.destroy_process_group()  # the next check wants one as the others have


@TABLE.check()
def sizes_that_differ_are_told(rank: Rank) -> None:
    """Of as many bytes, in the same packets but for the last."""
    t = torch.ones(30_000 + rank.rank, device=rank.device)

    def differ() -> None:
        lossycoll.wire_allreduce_(t, "int8")
        rank.wait_for_device()
        for _ in range(100):
            dist.all_reduce(torch.ones(1000, device=rank.device))

    said = r"int8 of torch.float32\[3000"
    with _of_any_size(), pytest.raises(lossycoll.MismatchError, match=said):
        differ()
    rank.wait_for_device()
    dist.destroy_process_group()


@TABLE.check()
def no_memory_between_the_exchanges(rank: Rank) -> None:
    """All ranks are told why, and nobody waits."""
    wire, describe = _wire(), device_wire._of_bytes

    def lacks(kind: Any, *rest: Any) -> Any:
        if kind is ENCODED_GATHER:
            raise MemoryError("out of memory, says a test")
        return describe(kind, *rest)

    t = torch.ones(30_000, device=rank.device)

    def call() -> None:
        for _ in range(100):
            lossycoll.wire_allreduce_(t, "int8")
            rank.wait_for_device()

    with _of_any_size(), pytest.MonkeyPatch.context() as patch:
        if rank.rank == 0:
            patch.setattr(device_wire, "_of_bytes", lacks)
        error = lossycoll.EngineError if rank.rank == 0 else lossycoll.AbortedError
        with pytest.raises(error, match=r"float32\[30000\].*no memory for it: out of memory"):
            call()
    assert wire._calls > 0
    rank.wait_for_device()
    got = t.cpu()
    assert (got.isnan() | (got >= 1.0)).all()
    assert len(set(got[~got.isnan()].tolist())) < 3, "half a result"
    dist.destroy_process_group()


@TABLE.check(cuda=True)
def two_groups_need_no_order(rank: Rank) -> None:
    """No call waits for another rank when it is made. The fake device has nothing beside the
    caller's stream, which waits."""
    _needs_codec(rank)
    other = dist.new_group(pg_options={"link": "udp"})
    groups = [None, other] if rank.rank % 2 else [other, None]
    tensors = [torch.full((30_000,), rank.rank + 1.0, device=rank.device) for _ in groups]
    how = {"wire": "int8", "lossy_min_bytes": 0}
    with _of_any_size(), lossycoll.reliable(**how):
        works = [
            dist.all_reduce(t, group=group, async_op=True)
            for t, group in zip(tensors, groups, strict=True)
        ]
    for work, t in zip(works, tensors, strict=True):
        assert work is not None
        work.wait()
        assert (t == rank.world * (rank.world + 1) / 2).all()


@TABLE.check()
def works_of_a_coalescing_manager_are_the_callers(rank: Rank) -> None:
    _needs_codec(rank)
    tensors = [torch.ones(1000 * n, device=rank.device) for n in (1, 2)]
    how = {"wire": "int8", "lossy_min_bytes": 0}
    with (
        _of_any_size(),
        lossycoll.reliable(**how),
        dist._coalescing_manager(async_ops=True) as manager,
    ):
        for t in tensors:
            dist.all_reduce(t)
    manager.wait()
    assert all((t == rank.world).all() for t in tensors)


@TABLE.check()
def small_calls_are_one_exchange(rank: Rank) -> None:
    _needs_codec(rank)
    before = _wire()._calls
    t = torch.ones(1000, device=rank.device)
    lossycoll.wire_allreduce_(t, "int8")
    assert (t == rank.world).all()
    assert _wire()._calls == before
