"""ShardedOptimizer in few bits: gradients, and parameters as differences to what replicas hold."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lossycoll
from tests.support.harness import EXACT, init, run_good
from tests.support.sharded_cases import batch, check_equal, flat, network, replicas, sharded
from tests.support.sharded_scripts import step_both

LOSSY = {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_LINK": "udp", "LOSSYCOLL_MTU": "576"}
ENV = {**LOSSY, **EXACT}
WIDTH, STEPS = 4096, 40
PULL = 1e-4
"""Of each step: what one step changes is far less than a grid of weights could tell."""


def pulled(wire: str | None, **rest: Any) -> tuple[nn.Parameter, Any]:
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(WIDTH))
    return weight, sharded([weight], torch.optim.SGD, lr=1.0, wire=wire, **rest)


def rank_pulls(rank: int, world: int) -> dict[str, Any]:
    """How far weights are from where small steps have brought them, by wire."""
    del world
    init()
    out: dict[str, Any] = {}
    for wire in ("same/int8", "same/int4", "int4/same"):
        for feedback in (False, True):
            weight, optimizer = pulled(wire, error_feedback=feedback)
            start = weight.detach().clone()
            pull = torch.full((WIDTH,), PULL)
            pull[::128], pull[1::128] = 20 * PULL, -7 * PULL  # the ends of groups
            for _ in range(STEPS):
                optimizer.zero_grad()
                (weight * pull).sum().backward()
                optimizer.step()
            optimizer.synchronize_parameters()
            moved = (start - weight.detach()) / PULL
            moved[::128] = moved[1::128] = STEPS
            rows = replicas(nn.ParameterList([weight]))
            off = float((moved - STEPS).abs().max())
            out[f"{wire} {feedback}"] = off, bool((rows == rows[0]).all())
    dist.destroy_process_group()
    return out


def test_small_steps_are_not_rounded_away() -> None:
    """Parameters are exact after all, whatever the wire. Gradients of 1 become 0.2 in int4, between
    -7 and 20: they need feedback, and then one step's error is left, up to half of 1.8."""
    for found in run_good(rank_pulls, 2, ENV):
        for wire in ("same/int8", "same/int4"):
            for feedback in (False, True):
                off, alike = found[f"{wire} {feedback}"]
                assert off < 0.1, "more than float32 rounds off"
                assert alike
        assert found["int4/same False"][0] > STEPS / 3
        assert found["int4/same True"][0] < 3


def rank_trains(rank: int, world: int) -> dict[str, Any]:
    """By wire: how far the model is from one that is trained alone, whether replicas held the same
    while they were trained, and packets that were lost."""
    init()
    out: dict[str, Any] = {}
    for wire, rest in (("int8", {}), ("int4/int6", {"max_age": 0}), ("bf16/int8", {"max_age": 1})):
        model, plain = network(64), network(64)
        mine = sharded(model.parameters(), torch.optim.AdamW, wire=wire, lr=1e-3, **rest)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        alike = []
        for step in range(20):
            step_both(mine, theirs, model, plain, batch(step, world), rank)
            rows = replicas(model)
            alike.append(float((rows - rows[0]).abs().max()))
        mine.synchronize_parameters()
        rows = replicas(model)
        off = float((flat(model.parameters()) - flat(plain.parameters())).abs().max())
        out[wire] = off, alike, bool((rows == rows[0]).all())
    out["lost"] = lossycoll.stats().packets_injected
    dist.destroy_process_group()
    return out


@pytest.mark.parametrize("loss", ["", "loss=0.2,seed=3"])
def test_replicas_hold_the_same_and_what_one_process_learns(loss: str) -> None:
    """20 steps of AdamW at 1e-3 move a weight by 0.02 at most."""
    ranks = run_good(rank_trains, 3, {**LOSSY, "LOSSYCOLL_INJECT": loss} if loss else ENV)
    assert (sum(found.pop("lost") for found in ranks) > 0) == bool(loss)
    for found in ranks:
        for wire, (off, alike, in_the_end) in found.items():
            assert off < (0.02 if loss else 0.008), wire
            assert in_the_end
            if not loss or wire == "int4/int6":
                assert max(alike) == 0
            else:
                assert 0 < max(alike) < 0.01


def rank_loads(rank: int, world: int) -> list[float]:
    """How far the model is from one trained alone, after both were given other weights."""
    init()
    model, plain = network(64), network(64)
    mine = sharded(model.parameters(), torch.optim.SGD, wire="same/int4", lr=1e-3)
    theirs = torch.optim.SGD(plain.parameters(), lr=1e-3)
    other = copy.deepcopy(plain.state_dict())
    for tensor in other.values():
        tensor.mul_(-3)
    out = []
    for step in range(6):
        if step == 3:
            plain.load_state_dict(other)
            # Replicas hold what the owners have, even if only one of them has loaded it.
            model.load_state_dict(other if rank < int(os.environ["LOADED"]) else model.state_dict())
        step_both(mine, theirs, model, plain, batch(step, world), rank)
        rows = replicas(model)
        assert bool((rows == rows[0]).all()), step
        out.append(float((flat(model.parameters()) - flat(plain.parameters())).abs().max()))
    dist.destroy_process_group()
    return out


def test_weights_that_are_loaded_are_not_rounded() -> None:
    for off in run_good(rank_loads, 2, {**ENV, "LOADED": "2"}):
        assert max(off) < 1e-4


def test_replicas_stay_alike_if_one_rank_is_given_other_weights() -> None:
    run_good(rank_loads, 2, {**ENV, "LOADED": "1"})


def rank_differs(rank: int, world: int) -> list[str]:
    del world
    init()
    out = []
    wires = ("int8", "int4") if rank else ("int8/same", "int8/same")
    try:
        sharded(network().parameters(), torch.optim.SGD, lr=0.1, wire=wires[0])
    except lossycoll.MismatchError as error:
        out.append(str(error))
    state = lossycoll.ARCTopKState()
    for wire in ("int9", "int8"):
        try:
            sharded(network().parameters(), torch.optim.SGD, lr=0.1, wire=wire, compression=state)
        except lossycoll.OptionError as error:
            out.append(str(error))
    dist.destroy_process_group()
    return out


def test_what_is_refused() -> None:
    for differs, unknown, both in run_good(rank_differs, 2, ENV):
        assert "int8/same" in differs
        assert unknown.startswith("wire is 'int9', wanted None, or one of same")
        assert "wanted None or 'same/...' with compression" in both


def rank_of_doubles(rank: int, world: int) -> float:
    """Elements that aren't float32 travel as they are."""
    init()
    model, plain = network().double(), network().double()
    mine = sharded(model.parameters(), torch.optim.SGD, wire="int2", lr=0.1, error_feedback=True)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        step_both(mine, theirs, model, plain, batch(step, world, torch.float64), rank)
    check_equal(model, plain)
    norm: Tensor | float = mine.residual_norm()
    dist.destroy_process_group()
    return float(norm)


def test_doubles_are_not_rounded() -> None:
    assert run_good(rank_of_doubles, 2, ENV) == [0.0, 0.0]
