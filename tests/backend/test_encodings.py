"""Float32 in fewer bytes, as a training script asks for it: which calls, and how exactly."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.plan.codec import codec_of
from tests.support.harness import EXACT, init, run_good

ENV = {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_MTU": "1500", "OMP_NUM_THREADS": "1", **EXACT}
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
            assert error < 0.1, f"{name} {call}: off by {error}"
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
    ([{"wire": "int2"}, {"wire": "int2", "wire_spikes": 1}], ("wire int2)", "wire int2+spikes)")),
]


@pytest.mark.parametrize("case", range(len(DIFFERENT)))
def test_ranks_that_differ_are_told_both_encodings(case: int) -> None:
    for text in run_good(rank_differs, 2, {**ENV, "DIFFERENT": str(case)}):
        assert all(name in text for name in DIFFERENT[case][1]), text
