"""measure_drift is exact: against numpy, on replicas of which each rank knows all.

And with DriftBound it stays small under loss.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from tests.support.harness import init, run_good

LOSS = {
    "LOSSYCOLL_INJECT": "loss=0.3,seed=5",
    "LOSSYCOLL_LOSSY_MIN_BYTES": "0",
    "LOSSYCOLL_REPAIR": "0",  # of gradients, whatever DriftBound would have
    "LOSSYCOLL_MTU": "1500",
    "LOSSYCOLL_LOG": "off",
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)


class Mixed(nn.Module):
    """Parameters of several types, one of them twice, one frozen, one empty, one permuted."""

    def __init__(self, rank: int, equal: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 if equal else rank)
        for dtype in DTYPES:
            values = torch.randn(37, 11, generator=generator, dtype=torch.float64).to(dtype)
            self.register_parameter(f"of_{str(dtype)[6:]}", nn.Parameter(values))
        self.inner = nn.Linear(5, 5)
        with torch.no_grad():
            for parameter in self.inner.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.again = self.inner
        self.frozen = nn.Parameter(torch.randn(6, generator=generator), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0))
        image = torch.randn(2, 3, 4, 5, generator=generator)
        self.image = nn.Parameter(image.to(memory_format=torch.channels_last))
        self.scalar = nn.Parameter(torch.randn((), generator=generator))


def oracle(replicas: list[dict[str, Tensor]]) -> tuple[dict[str, float], float, float]:
    """By the definition, over pairs: of each parameter, in total, and the relative distance."""
    wide = [{name: _wide(t) for name, t in of.items()} for of in replicas]
    pairs = [(a, b) for i, a in enumerate(wide) for b in wide[i + 1 :]]
    each = {
        name: float(np.mean([np.sum(np.abs(a[name] - b[name]) ** 2) for a, b in pairs]))
        for name in wide[0]
    }
    total = sum(each.values())
    norm = sum(
        float(np.sum(np.abs(np.mean([of[name] for of in wide], axis=0)) ** 2)) for name in wide[0]
    )
    return each, total, math.sqrt(total / norm)


def _wide(tensor: Tensor) -> Any:
    return tensor.detach().to(torch.complex128).numpy()


def under_loss(rank: int, world: int) -> dict[str, Any]:
    init()
    out: dict[str, Any] = {"measured": whole_models(rank, world), "ddp": ddp(rank)}
    out["spread"] = {hooked: neighbours(hooked) for hooked in (False, True)}
    out["apart"] = apart(rank)
    out["injected"] = lossycoll.stats().packets_injected
    dist.destroy_process_group()
    return out


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_good(under_loss, 3, LOSS)


def whole_models(rank: int, world: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    models = [Mixed(r) for r in range(world)]
    own = models[rank]
    want = oracle([dict(model.named_parameters()) for model in models])
    out["far"] = (lossycoll.measure_drift(own), want)
    out["equal"] = lossycoll.measure_drift(Mixed(rank, equal=True))

    from lossycoll.train.drift import measure as drift

    largest = 0
    original = dist.all_reduce

    def spied(tensor: Tensor, *args: Any, **rest: Any) -> Any:
        nonlocal largest
        largest = max(largest, tensor.numel())
        return original(tensor, *args, **rest)

    whole, drift.BATCH = drift.BATCH, 64  # type: ignore[misc]
    dist.all_reduce = spied
    out["in chunks"] = (lossycoll.measure_drift(own), largest)
    drift.BATCH, dist.all_reduce = whole, original  # type: ignore[misc]

    torch.manual_seed(rank)
    net = nn.Linear(7, 3)
    plain = lossycoll.measure_drift(net)
    compiled = nn.Module()  # torch.compile's wrapper, without its seconds of imports
    compiled._orig_mod = net
    out["compiled"] = (plain, lossycoll.measure_drift(compiled))
    wrapped = DistributedDataParallel(net)  # which makes them equal
    out["names"] = (list(plain.per_parameter), list(lossycoll.measure_drift(wrapped).per_parameter))
    out["wrapped"] = lossycoll.measure_drift(wrapped).total

    pair = dist.new_group([0, 2])
    if rank != 1:
        want = oracle([dict(models[r].named_parameters()) for r in (0, 2)])
        out["pair"] = (lossycoll.measure_drift(own, pair), want)
    alone = [dist.new_group([r]) for r in range(world)][rank]
    out["alone"] = lossycoll.measure_drift(own, alone)
    gloo = dist.new_group(backend="gloo")
    out["gloo"] = lossycoll.measure_drift(own, gloo)

    if rank == 1:
        with torch.no_grad():
            own.inner.bias[2] = math.nan
    out["nan"] = lossycoll.measure_drift(own)
    return out


def close(got: lossycoll.Drift, want: tuple[dict[str, float], float, float]) -> None:
    each, total, relative = want
    assert got.total == pytest.approx(total, rel=1e-12)
    assert got.relative_rms == pytest.approx(relative, rel=1e-12)
    assert dict(got.per_parameter) == pytest.approx(each, rel=1e-12)
    assert math.fsum(got.per_parameter.values()) == got.total


def test_of_whole_models(ranks: list[dict[str, Any]]) -> None:
    first, _, last = (rank["measured"] for rank in ranks)
    for got in (rank["measured"] for rank in ranks):
        close(*got["far"])
        assert "again.weight" not in got["far"][0].per_parameter  # tied, and counted once
        equal = got["equal"]
        assert (equal.total, equal.relative_rms) == (0.0, 0.0)
        assert set(equal.per_parameter.values()) == {0.0}
        in_chunks, largest = got["in chunks"]
        close(in_chunks, got["far"][1])
        assert largest <= 2 * 64  # a complex element is two real ones
        plain, compiled = got["compiled"]  # sums are formed in the order in which addends come
        assert compiled.total == pytest.approx(plain.total, rel=1e-12)
        assert list(compiled.per_parameter) == list(plain.per_parameter)
        assert got["names"][0] == got["names"][1] == ["weight", "bias"]
        assert got["wrapped"] == 0.0
        close(got["gloo"], got["far"][1])
        assert got["alone"].total == got["alone"].relative_rms == 0.0
        assert math.isnan(got["nan"].total)
        assert math.isnan(got["nan"].relative_rms)
        bad = [name for name, value in got["nan"].per_parameter.items() if math.isnan(value)]
        assert bad == ["inner.bias"]
        assert got["far"][0] == first["far"][0]  # to the bit, on all ranks
    close(*first["pair"])
    assert first["pair"] == last["pair"]


# ---- what ranks don't hold alike ----


def parameters(*pairs: tuple[str, Tensor]) -> nn.Module:
    model = nn.Module()
    for name, values in pairs:
        model.register_parameter(name, nn.Parameter(values))
    return model


def apart(rank: int) -> dict[str, Any]:
    """What each rank raises where rank 1 has another model, and of a group it isn't in."""
    three, two = torch.ones(3), torch.ones(2, 3)
    image = torch.ones(2, 3, 4, 5)
    models = {
        "order": (("a", three), ("b", three)),
        "shape": (("a", two),),
        "type": (("a", three),),
        "memory": (("a", image),),
        "fewer": (("a", three), ("b", two)),
        "none": (("a", three),),
    }
    others = {
        "order": (("b", three), ("a", three)),
        "shape": (("a", two.t().contiguous()),),
        "type": (("a", three.double()),),
        "memory": (("a", image.to(memory_format=torch.channels_last)),),
        "fewer": (("a", three),),
        "none": (),
    }
    out: dict[str, Any] = {}
    for name, pairs in (others if rank == 1 else models).items():
        try:
            out[name] = lossycoll.measure_drift(parameters(*pairs))
        except lossycoll.MismatchError as error:
            out[name] = (error.peer, str(error))
    huge = torch.full((1,), 8e153 * rank, dtype=torch.float64)
    out["huge"] = lossycoll.measure_drift(parameters(*((f"of{i}", huge) for i in range(4))))
    pair = dist.new_group([0, 2])
    model = parameters(("a", three))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: dict[str, Callable[[], Any]] = {
        "drift": lambda: lossycoll.measure_drift(model, pair),
        "bound": lambda: lossycoll.DriftBound(model, optimizer, group=pair),
        "sharded": lambda: lossycoll.ShardedOptimizer(
            model.parameters(), torch.optim.SGD, pair, lr=0.1
        ),
    }
    if rank == 1:
        for name, call in calls.items():
            with pytest.raises(lossycoll.UnsupportedError, match="isn't in the group") as caught:
                call()
            out[f"outside, {name}"] = str(caught.value)
    return out


def test_ranks_that_hold_something_else_all_learn_what(ranks: list[dict[str, Any]]) -> None:
    one = "torch.float32 [3]"
    differ = {
        "order": (f"a {one}", f"b {one}"),
        "shape": ("a torch.float32 [2, 3]", "a torch.float32 [3, 2]"),
        "type": (f"a {one}", "a torch.float64 [3]"),
        "memory": (
            "a torch.float32 [2, 3, 4, 5]",
            "a torch.float32 [2, 3, 4, 5] strides [60, 1, 15, 3]",
        ),
        "fewer": ("b torch.float32 [2, 3]", "nothing more"),
        "none": (f"a {one}", "nothing more"),
    }
    for rank, got in enumerate(rank["apart"] for rank in ranks):
        for name, (most, other) in differ.items():
            peer, text = got[name]
            here, there = (other, most) if rank == 1 else (most, other)
            assert peer == (0 if rank == 1 else 1)
            assert f"rank {rank}/3: ranks hold different parameters: {here} here, {there}" in text
            assert f"{there} on rank {peer} (127.0.0.1:" in text
        assert got["huge"].total == math.inf
    assert len([name for name in ranks[1]["apart"] if name.startswith("outside")]) == 3


# ---- what DriftBound bounds ----


def regress(
    rank: int, model: nn.Module, wrapped: nn.Module, steps: int, *, period: int = 0, **rest: Any
) -> list[float]:
    """Trains on noise of each rank's own; the drift at each of the last half of the steps."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    bound = lossycoll.DriftBound(wrapped, optimizer, period, **rest) if period else None
    generator = torch.Generator().manual_seed(rank)
    drifts = []
    no_sync: Callable[[], Any] = getattr(wrapped, "no_sync", contextlib.nullcontext)
    for step in range(steps):
        for last in (False, True):
            inputs = torch.randn(8, 40, generator=generator)
            # A static graph is recorded in its first steps, which torch wants to be in sync.
            with contextlib.nullcontext() if last or step < 2 else no_sync():
                (wrapped(inputs) - inputs.flip(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= steps // 2:
            drifts.append(lossycoll.measure_drift(model).total)
    if bound is not None:
        assert bound.steps == steps  # not the backward passes
        bound.detach()
    return drifts


def ddp(rank: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, static, rest in (
        ("without", False, {}),
        ("with", False, {"period": 4}),
        ("static graph", True, {"period": 4}),
        ("no repair", True, {"period": 4, "repair": 0}),
    ):
        model = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 40))
        wrapped = DistributedDataParallel(model, static_graph=static)
        out[name] = regress(rank, model, wrapped, 60, **rest)
        del wrapped
    return out


def neighbours(hooked: bool) -> tuple[float, float, int]:
    """Of a mean of ones: the share of elements that lack something, the share of those whose right
    neighbour does, too, and how many there are."""
    model = nn.Linear(211, 307, bias=False)
    wrapped = DistributedDataParallel(model)
    if hooked:
        wrapped.register_comm_hook(None, lossycoll.dispersing_hook)
    scale = 1.0 + dist.get_rank()
    (wrapped(torch.eye(211)).sum() * scale).backward()
    assert model.weight.grad is not None
    off = (model.weight.grad.flatten() - 2.0).abs() > 1e-3
    both = off[:-1] & off[1:]
    return float(off.double().mean()), float(both.sum() / off.sum()), int(off.sum())


def bounded(drifts: list[float], free: list[float], period: int) -> bool:
    """Whether no drift is more than a few periods' worth of steps."""
    per_step = free[-1] / (2 * len(free))
    return max(drifts) < 3 * period * per_step


def test_ddp_under_loss_stays_together(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        got = rank["ddp"]
        assert rank["injected"] > 1000
        assert got == ranks[0]["ddp"]
        free = got["without"]
        assert free[-1] > 1.3 * free[0]  # it grows
        for name in ("with", "static graph", "no repair"):
            assert min(got[name]) > 0
            assert bounded(got[name], free, 4), (name, got[name], free)
        assert not bounded(free, free, 4)


def test_what_is_lost_is_scattered_by_the_hook(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        plain, hooked = rank["spread"][False], rank["spread"][True]
        for share, _, count in (plain, hooked):
            assert 0.1 < share < 0.95
            assert count > 1000
        assert plain[1] > 0.98
        # Of a neighbour nothing is known: its packet is another one.
        assert abs(hooked[1] - hooked[0]) < 0.2
