"""Float32 in fewer bytes, as a training script asks for it: which calls, and how exactly."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lossycoll
from tests.oracle.codec import codec_of
from tests.support.harness import EXACT, init, run_good

ENV = {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_MTU": "1500", "OMP_NUM_THREADS": "1", **EXACT}
ENV |= {"LOSSYCOLL_LINK": "udp"}  # within a host nothing is encoded
ELEMENTS = 3 * 20_000


def data(rank: int, count: int = ELEMENTS) -> torch.Tensor:
    """Of which sums are exact in float32, but every encoding rounds each."""
    rng = np.random.default_rng(rank)
    drawn = rng.integers(-(1 << 13), 1 << 13, count)
    return torch.from_numpy(drawn.astype(np.float32)) / (1 << 12)


def in_lists(call: Callable[..., Any], rank: int, own: torch.Tensor, root_lists: str) -> Any:
    """gather and scatter, whose lists are the root's."""
    world = dist.get_world_size()
    if root_lists == "outputs":
        parts = [torch.empty_like(own) for _ in range(world)] if rank == 0 else None
        call(own, parts, dst=0)
        return None if parts is None else torch.cat(parts)
    out = torch.empty(len(own) // world)
    call(out, list(own.chunk(world)) if rank == 0 else None, src=0)
    return out


def calls(rank: int, world: int) -> dict[str, tuple[Callable[[], Any], torch.Tensor]]:
    """Calls by name, each with its exact result; None at ranks that get none."""
    own, everyone = data(rank), [data(r) for r in range(world)]
    chunk = len(own) // world
    total = torch.stack(everyone).sum(0)

    def in_place(call: Callable[..., Any], tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        call(tensor, *how)
        return tensor

    def into(call: Callable[..., Any], out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        call(out, source)
        return out

    pairs = torch.complex(own, -own)
    return {
        "all_reduce": (lambda: in_place(dist.all_reduce, own.clone()), total),
        "max": (
            lambda: in_place(dist.all_reduce, own.clone(), dist.ReduceOp.MAX),
            torch.stack(everyone).amax(0),
        ),
        "complex": (lambda: in_place(dist.all_reduce, pairs.clone()), torch.complex(total, -total)),
        "reduce_scatter": (
            lambda: into(dist.reduce_scatter_single, torch.empty(chunk), own),
            total.chunk(world)[rank],
        ),
        "all_gather": (
            lambda: into(dist.all_gather_single, torch.empty(world * len(own)), own),
            torch.cat(everyone),
        ),
        "gather": (lambda: in_lists(dist.gather, rank, own, "outputs"), torch.cat(everyone)),
        "small": (lambda: in_place(dist.all_reduce, own[:99].clone()), total[:99]),
        "double": (lambda: in_place(dist.all_reduce, own.double()), total.double()),
        "integers": (
            lambda: in_place(dist.all_reduce, (own * 4096).long()),
            (total * 4096).long(),
        ),
        "broadcast": (lambda: in_place(dist.broadcast, own.clone(), 0), everyone[0]),
        "scatter": (
            lambda: in_lists(dist.scatter, rank, own, "inputs"),
            everyone[0].chunk(world)[rank],
        ),
        "all_to_all": (
            lambda: into(dist.all_to_all_single, torch.empty_like(own), own),
            torch.cat([one.chunk(world)[rank] for one in everyone]),
        ),
    }


def rank_calls(rank: int, world: int) -> dict[str, tuple[set[str], bytes]]:
    """By block: which calls were rounded, and the all-reduced bits."""
    init()
    blocks: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
        "": contextlib.nullcontext,
        "lossy(repair=1)": lambda: lossycoll.lossy(repair=1),
        "lossy(wire=fp16)": lambda: lossycoll.lossy(wire="fp16"),
        "reliable()": lossycoll.reliable,
        "reliable(wire=bf16)": lambda: lossycoll.reliable(wire="bf16"),
        "reliable(wire=int8/int6)": lambda: lossycoll.reliable(
            wire="int8/int6", wire_rounding="stochastic"
        ),
    }
    out = {}
    for name, block in blocks.items():
        rounded, bits = set(), b""
        for call, (run, want) in calls(rank, world).items():
            with block():
                got = run()
            if got is None:
                continue
            error = (got - want).abs().max().item()
            most = 0.4 if "int" in name else 0.1
            assert error < most, f"{name} {call}: off by {error}"
            if error:
                rounded.add(call)
            if call == "all_reduce":
                bits = got.numpy().tobytes()
        out[name] = rounded, bits
    dist.destroy_process_group()
    return out


GATHERED = {"all_reduce", "max", "complex", "reduce_scatter", "all_gather", "gather"}
HANDED_OUT = {"broadcast", "scatter", "all_to_all"}


def test_who_asks_for_an_encoding_gets_it_and_nothing_else_is_rounded() -> None:
    ranks = run_good(rank_calls, 3, {**ENV, "LOSSYCOLL_WIRE": "bf16"})
    total = sum(data(rank) for rank in range(3))
    for rank, found in enumerate(ranks):
        here = GATHERED - (set() if rank == 0 else {"gather"})
        asked = here | HANDED_OUT - (set() if rank else {"scatter"})  # what the root keeps
        assert found[""][0] == here
        assert found["lossy(repair=1)"][0] == here
        assert found["lossy(wire=fp16)"][0] == asked
        assert found["reliable()"][0] == set()
        assert found["reliable(wire=bf16)"][0] == asked
        assert found["reliable(wire=int8/int6)"][0] == asked
        for block, encoding in (("", "bf16"), ("lossy(wire=fp16)", "fp16")):
            bits = found[block][1]
            assert bits == ranks[0][block][1], "replicas differ"
            got = np.frombuffer(bits, np.float32)
            made = codec_of(encoding, "f32")
            np.testing.assert_array_equal(made.decode(made.encode(got), len(got)), got)
            assert np.abs(got - np.asarray(total)).max() > 0


def test_alone_nothing_is_rounded() -> None:
    (found,) = run_good(rank_calls, 1, {**ENV, "LOSSYCOLL_WIRE": "bf16"})
    assert all(rounded == set() for rounded, _ in found.values())


def rank_bytes(rank: int, world: int) -> dict[str, int]:
    del rank, world
    init()
    out = {}
    for wire in ("same", "bf16", "fp16", "int8", "int4"):
        before = lossycoll.stats().bytes_sent
        with lossycoll.lossy(wire=wire):
            dist.all_reduce(torch.ones(1 << 20))
        dist.barrier()
        out[wire] = lossycoll.stats().bytes_sent - before
    dist.destroy_process_group()
    return out


def test_fewer_bytes_travel() -> None:
    for sent in run_good(rank_bytes, 2, ENV):
        assert sent["bf16"] == pytest.approx(sent["same"] / 2, rel=0.02)
        assert sent["fp16"] == pytest.approx(sent["same"] / 2, rel=0.02)
        assert sent["int8"] == pytest.approx(sent["same"] * (8 + 40 / 128) / 32, rel=0.03)
        assert sent["int4"] == pytest.approx(sent["same"] * (4 + 40 / 128) / 32, rel=0.03)


def rank_differs(rank: int, world: int) -> str:
    del world
    init()
    with (
        pytest.raises(lossycoll.MismatchError) as caught,
        lossycoll.lossy(**DIFFERENT[int(os.environ["DIFFERENT"])][0][rank]),
    ):
        dist.all_reduce(torch.ones(ELEMENTS))
    return str(caught.value)


DIFFERENT: list[tuple[list[dict[str, Any]], tuple[str, str]]] = [
    ([{"wire": "bf16"}, {"wire": "fp16"}], ("wire bf16", "wire fp16")),
    ([{"wire": "int4"}, {"wire": "int4", "wire_group": 32}], ("wire int4)", "wire int4/32)")),
    ([{"wire": "int4/int8"}, {"wire": "int8"}], ("wire int4:int8)", "wire int8)")),
    ([{"wire": "int2"}, {"wire": "int2", "wire_spikes": 1}], ("wire int2)", "wire int2+spikes)")),
]


@pytest.mark.parametrize("case", range(len(DIFFERENT)))
def test_ranks_that_differ_are_told_both_encodings(case: int) -> None:
    for text in run_good(rank_differs, 2, {**ENV, "DIFFERENT": str(case)}):
        assert all(name in text for name in DIFFERENT[case][1]), text


# ---- what is not finite ----


def rank_not_finite(rank: int, world: int) -> tuple[int, list[int]]:
    """How many groups this rank spoilt, and which elements are not finite then."""
    del world
    init()
    tensor = torch.ones(ELEMENTS)
    tensor[5 if rank == 0 else -1] = float("inf") if rank == 0 else float("nan")
    with lossycoll.reliable(wire="int8"):
        dist.all_reduce(tensor)
    spoilt = lossycoll.last_report().nan_groups
    assert spoilt == lossycoll.stats().nan_groups
    with lossycoll.reliable(wire="bf16"):  # rounds each element by itself
        dist.all_reduce(torch.full((ELEMENTS,), float("nan")))
    assert spoilt == lossycoll.stats().nan_groups
    dist.destroy_process_group()
    return spoilt, torch.nonzero(~torch.isfinite(tensor)).flatten().tolist()


def test_groups_that_are_not_finite_are_nan_and_counted() -> None:
    (one, indices), (other, same) = run_good(rank_not_finite, 2, ENV)
    # The results of both groups; and the contributions, where another rank adds them up.
    assert 2 <= one + other <= 4
    assert indices == same
    last = [index for index in indices if index >= 128]
    assert indices[: -len(last)] == list(range(128))
    assert last == list(range(ELEMENTS - len(last), ELEMENTS))
    assert len(last) <= 128


# ---- floats of two bytes, in a few bits ----

HALVES = {"bf16": torch.bfloat16, "f16": torch.float16, "c32": torch.complex32}


def half(rank: int, name: str) -> torch.Tensor:
    """Of that dtype, drawn."""
    drawn = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(rank))
    if name == "c32":
        drawn = torch.view_as_complex(drawn.view(-1, 2))
    return drawn.to(HALVES[name])


def half_calls(rank: int, own: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Calls by name, each with the result that this rank gets."""
    world = dist.get_world_size()
    chunk = len(own) // world

    def of_one(call: Callable[..., Any], *how: Any) -> torch.Tensor:
        tensor = own.clone()
        call(tensor, *how)
        return tensor

    def into(call: Callable[..., Any], elements: int) -> torch.Tensor:
        out = own.new_empty(elements)
        call(out, own)
        return out

    def lists(call: Callable[..., Any]) -> torch.Tensor:
        parts = [torch.empty_like(own) for _ in range(world)]
        call(parts, own)
        return torch.cat(parts)

    def strided() -> torch.Tensor:
        rows = torch.zeros(2 * len(own), dtype=own.dtype)[::2]
        rows.copy_(own)
        dist.all_reduce(rows)
        return rows

    found: dict[str, Callable[[], torch.Tensor]] = {
        "all_reduce": lambda: of_one(dist.all_reduce),
        "mean": lambda: of_one(dist.all_reduce, dist.ReduceOp.AVG),
        "strided": strided,
        "reduce": lambda: of_one(dist.reduce, 1),
        "reduce_scatter": lambda: into(dist.reduce_scatter_single, chunk),
        "all_gather": lambda: into(dist.all_gather_single, world * len(own)),
        "all_gather lists": lambda: lists(dist.all_gather),
        "broadcast": lambda: of_one(dist.broadcast, 0),
        "all_to_all": lambda: into(dist.all_to_all_single, len(own)),
    }
    if not own.is_complex():
        found["max"] = lambda: of_one(dist.all_reduce, dist.ReduceOp.MAX)
    return found


def rank_halves(rank: int, world: int) -> dict[str, bytes]:
    """What ranks must have alike, by call; the rest is compared here."""
    init()
    alike = {}
    for name, dtype in HALVES.items():
        own = half(rank, name)
        wide = own.to(torch.complex64 if own.is_complex() else torch.float32)
        for call, run in half_calls(rank, own).items():
            before = lossycoll.stats().bytes_sent
            with lossycoll.reliable(wire="int6", wire_spikes=1):
                got = run()
                sent = lossycoll.stats().bytes_sent - before
                want = half_calls(rank, wide)[call]()
            exact = run()
            assert (got.dtype, exact.dtype) == (dtype, dtype)
            got, want, exact = (t.to(wide.dtype) for t in (got, want, exact))
            # The order of a float32 sum may differ, so what it rounds to may.
            torch.testing.assert_close(got, want.to(dtype).to(wide.dtype), rtol=2**-7, atol=2**-7)
            if call not in ("broadcast", "reduce"):
                assert (got != exact).any(), f"{name} {call}: nothing was rounded"
            if call == "all_reduce":
                of_same = 2 * (world - 1) / world * own.nbytes  # 16 bits an element
                assert sent == pytest.approx(of_same * (6 + 104 / 128) / 16, rel=0.1)
            if call in ("all_reduce", "mean", "all_gather", "broadcast", "max"):
                alike[f"{name} {call}"] = got.numpy().tobytes()
    dist.destroy_process_group()
    return alike


def test_floats_of_two_bytes_are_as_float32_narrowed_in_the_end() -> None:
    ranks = run_good(rank_halves, 3, ENV)
    assert len(ranks[0]) == 14
    assert all(found == ranks[0] for found in ranks)


def rank_reduces_twice(rank: int, world: int) -> float:
    """What rank 1 has of two calls, of which it is the root of the second."""
    del world
    init()
    tensor = torch.full((ELEMENTS,), float(rank + 1), dtype=torch.bfloat16)
    with lossycoll.reliable(wire="int8"):
        first = dist.reduce(tensor, 0, async_op=True)
        dist.barrier()
        if rank == 0:
            first.wait()
            tensor.fill_(1)
        second = dist.reduce(tensor, 1, async_op=True)
        second.wait()
        if rank == 1:
            first.wait()
    dist.destroy_process_group()
    return tensor[0].item()


def test_who_only_contributes_keeps_what_it_has() -> None:
    assert run_good(rank_reduces_twice, 2, ENV)[1] == 3


def rank_other_dtype(rank: int, world: int) -> str:
    """An uneven call, of which ranks don't compare a tensor."""
    init()
    parts = [torch.ones(ELEMENTS + peer) for peer in range(world)]
    parts = [part.to(torch.bfloat16 if rank else torch.float16) for part in parts]
    with pytest.raises(lossycoll.MismatchError) as caught, lossycoll.reliable(wire="int8"):
        dist.reduce_scatter(torch.empty_like(parts[rank]), parts)
    return str(caught.value)


def test_ranks_whose_floats_of_two_bytes_differ_are_told() -> None:
    for text in run_good(rank_other_dtype, 2, ENV):
        assert "float16" in text, text
        assert "bfloat16" in text, text


def rank_on_hosts(rank: int, world: int) -> dict[str, tuple[float, bool, bytes]]:
    """By wire: how far an all-reduce and a reduce-scatter are off at most, whether an all-gather is
    exact, and the first's bits. The ranks of a host cancel all but a small part of each other's
    contributions."""
    options = lossycoll.Options(link="auto", host=os.environ["HOSTS"][rank])
    dist.init_process_group("lossy", pg_options=options, timeout=timedelta(seconds=60))
    assert lossycoll.topology().n_hosts == len(set(os.environ["HOSTS"]))
    small = torch.stack([torch.randn(40_000, generator=seeded(r)) for r in range(world)])
    large = 1000 * torch.randn(40_000, generator=seeded(world + rank // 2)) * (-1) ** rank
    total, out = small.sum(0), {}
    for wire in ("int8", "int4", "fp16"):
        whole, part = small[rank] + large, torch.empty(len(total) // world)
        with lossycoll.reliable(wire=wire):
            dist.all_reduce(whole)
            dist.reduce_scatter_single(part, small[rank] + large)
            copies = torch.empty(small.numel())
            dist.all_gather_single(copies, small[rank])
        exact = copies.equal(small.flatten())
        off = max((whole - total).abs().max(), (part - total.chunk(world)[rank]).abs().max())
        out[wire] = float(off), exact, whole.numpy().tobytes()
    dist.destroy_process_group()
    return out


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("hosts", ["aabb", "aaaa"])
def test_what_is_added_up_within_a_host_is_not_rounded(hosts: str) -> None:
    """A step of int8 is 0.06 of sums up to 8, and would be 30 of contributions up to 4000."""
    ranks = run_good(rank_on_hosts, 4, {**ENV, "HOSTS": hosts})
    for found in ranks:
        for wire, (off, exact, bits) in found.items():
            rounded = {"int8": 0.1, "int4": 2, "fp16": 0.02}[wire]
            assert off < (rounded if hosts == "aabb" else 2e-3)
            assert (off > 2e-3) == (hosts == "aabb"), "nothing leaves a host"
            assert exact == (hosts == "aaaa")
            assert bits == ranks[0][wire][2]


def rank_loses(rank: int, world: int) -> int:
    """The packets that were missing."""
    del rank
    init()
    for _ in range(5):
        tensor = torch.full((ELEMENTS,), 3.0, dtype=torch.bfloat16)
        with lossycoll.lossy(wire="int4"):
            dist.all_reduce(tensor)
        # A sum stands for all ranks, however many contributions arrived; and where none but the
        # own did, it is that.
        found = set(tensor.unique().tolist())
        assert 3.0 * world in found <= {3.0, 3.0 * world}, found
    missing = lossycoll.stats().packets_missing
    dist.destroy_process_group()
    return missing


def test_floats_of_two_bytes_lose_packets_as_others_do() -> None:
    found = run_good(rank_loses, 3, {**ENV, "LOSSYCOLL_INJECT": "loss=0.3,seed=7"})
    assert all(missing > 0 for missing in found)
