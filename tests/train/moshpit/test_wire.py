"""Tensors that travel in few bits: all get the same, and training goes on as it should."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lossycoll
from lossycoll import MoshpitAverager, MoshpitSGD, Options, Swarm
from tests.support.swarms import Make, all_do, made_in

PEERS = 3
UDP = Options(link="udp")
"""As on a network: within a machine packets carry plain floats."""


@pytest.fixture
def swarms() -> Iterator[list[Swarm]]:
    with ExitStack() as stack:
        made = [stack.enter_context(Swarm("127.0.0.1:0", name="0", bandwidth=3e6, options=UDP))]
        made += [
            stack.enter_context(
                Swarm(join=[made[0].address], name=str(n), bandwidth=1e6 * n, options=UDP)
            )
            for n in range(1, PEERS)
        ]
        yield made


@pytest.mark.parametrize("wire", ["int8", "int4", "int4/int8", "bf16", "fp16"])
def test_tensors_of_all_types_and_odd_sizes(wire: str, swarms: list[Swarm]) -> None:
    rng = torch.Generator().manual_seed(1)
    peers = [
        [
            torch.randn(31, 77, generator=rng),
            torch.randn(1, generator=rng),
            torch.randn(4001, generator=rng).half(),
            torch.randn(129, 3, generator=rng).bfloat16().t(),
        ]
        for _ in range(PEERS)
    ]
    exact = [torch.stack([p.double() for p in same]).mean(0) for same in zip(*peers, strict=True)]
    averagers = [
        MoshpitAverager(swarm, own, grid=(PEERS,), wire=wire)
        for swarm, own in zip(swarms, peers, strict=True)
    ]
    reports = all_do(PEERS, lambda peer: averagers[peer].step(timeout=30.0))
    assert {(one.failure, one.kept) for one in reports} == {("", 0.0)}
    most = {"int8": 0.06, "int4/int8": 0.6, "int4": 0.8, "bf16": 0.03, "fp16": 0.02}[wire]
    for own in peers:
        for tensor, first, mean in zip(own, peers[0], exact, strict=True):
            assert torch.equal(tensor, first)
            assert float((tensor.double() - mean).abs().max()) < most


def train(swarms: Sequence[Swarm], wire: str | None, forgets: bool) -> tuple[float, list[Any]]:
    """The loss in the end. Each step is far below half a step of the grid."""
    torch.manual_seed(3)
    inputs, wanted = torch.randn(64, 256), torch.randn(1, 256)
    models = [nn.Linear(256, 1, bias=False) for _ in swarms]
    for model in models:
        model.load_state_dict(models[0].state_dict())
        with torch.no_grad():
            model.weight[0, ::128] = 6.0  # nothing pulls at them: the inputs are 0 there
    inputs[:, ::128] = 0
    wanted[:, ::128] = 6.0
    labels = inputs @ wanted.t()
    barrier = threading.Barrier(PEERS)

    def work(peer: int) -> float:
        own = models[peer]
        averager = MoshpitAverager(swarms[peer], own.parameters(), grid=(PEERS,), wire=wire)
        inner = torch.optim.SGD(own.parameters(), lr=2e-3)
        optimizer = MoshpitSGD(own, inner, averager)
        barrier.wait()
        for _ in range(200):
            optimizer.zero_grad()
            nn.functional.mse_loss(own(inputs), labels).backward()
            assert own.weight.grad is not None
            report = optimizer.step()
            assert report is not None
            assert (report.failure, report.kept) == ("", 0.0)
            if forgets:
                swarms[peer].member.means.owed = np.zeros(0, np.float32)
        return nn.functional.mse_loss(own(inputs), labels).item()

    return all_do(PEERS, work)[0], models


def test_training_takes_steps_that_are_smaller_than_the_grids() -> None:
    losses = {}
    for wire, forgets in ((None, False), ("int8", False), ("int8", True)):
        with ExitStack() as stack:
            swarms = made_in(stack, PEERS, link="udp")
            losses[wire, forgets], models = train(swarms, wire, forgets)
        for model in models[1:]:
            assert torch.equal(model.weight, models[0].weight)
    assert losses["int8", False] < 1.5 * losses[None, False] + 0.05
    assert losses["int8", True] > 2 * losses["int8", False], "nothing was rounded off"


@pytest.mark.parametrize("how", ["within a machine", "as on a network"])
def test_peers_of_one_machine_average_plain_floats(
    how: str, made: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """Which take less time there, and lose nothing; unless the options say otherwise."""
    values = [torch.randn(5000, generator=torch.Generator().manual_seed(n)) for n in range(PEERS)]
    exact = torch.stack(values).mean(0)
    swarms = made(PEERS, **({"link": "udp"} if how == "as on a network" else {}))
    averagers = [
        MoshpitAverager(swarm, [own], wire="int8")
        for swarm, own in zip(swarms, values, strict=True)
    ]
    with caplog.at_level(logging.INFO, "lossycoll"):
        for _ in range(2):
            reports = all_do(PEERS, lambda peer: averagers[peer].step(timeout=30.0))
            assert {(one.failure, one.kept) for one in reports} == {("", 0.0)}
    is_exact = all(torch.allclose(one, exact, rtol=0, atol=1e-6) for one in values)
    assert is_exact == (how == "within a machine")
    told = [one for one in caplog.records if "average plain floats in place of int8" in one.message]
    assert len(told) == PEERS * is_exact


def test_a_peer_that_carries_few_bits_everywhere_is_told_that_others_do_not() -> None:
    with Swarm("127.0.0.1:0", name="0") as first:
        MoshpitAverager(first, [torch.zeros(5)], wire="int8")
        with Swarm(join=[first.address], name="1", options=UDP) as second:
            said = "your packets carry 'int8 everywhere', and those of '0' 'int8'"
            with pytest.raises(lossycoll.RendezvousError, match=said):
                MoshpitAverager(second, [torch.zeros(5)], wire="int8")


def test_a_wire_that_cannot_be(swarms: list[Swarm]) -> None:
    with pytest.raises(lossycoll.OptionError, match="wire"):
        MoshpitAverager(swarms[0], [torch.zeros(5)], wire="int7")
