"""Peers whose values aren't finite, in rounds that lose packets or fail: over real sockets, each
peer by a thread."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lossycoll import MoshpitAverager, MoshpitSGD
from lossycoll.runtime.swarm.member import RoundReport
from tests.support.swarms import Make, all_do
from tests.train.moshpit.test_sgd import alone, backward, inner, outer, parameters

SIDE = 128
SICK, AT = 1, 5
"""The peer that has a sick batch, and in which step."""
HOWS: dict[str, dict[str, Any]] = {
    "parameters": {},
    "delayed": {"delayed": True},
    "fragments": {"fragments": 2},
    "outer": {"outer": outer},
    "outer, delayed": {"outer": outer, "delayed": True},
    "pseudo-gradients": {"average": "pseudo-gradients", "outer": outer, "fragments": 2},
    "gradients": {"average": "gradients"},
}


def are_finite(state: Any) -> bool:
    return all(bool(torch.as_tensor(x).isfinite().all()) for one in state for x in one.values())


@pytest.mark.parametrize("name", HOWS)
def test_a_peer_is_healed_of_a_sick_batch_though_packets_are_lost(name: str, made: Make) -> None:
    """A mean of so many packets never comes whole; and healthy peers take no harm."""
    swarms = made(3, link="udp", inject="loss=0.3,seed=4", repair=0)
    models: list[nn.Module] = [nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE))]
    models += [copy.deepcopy(models[0]) for _ in swarms[1:]]
    averagers = [MoshpitAverager(s, m.parameters()) for s, m in zip(swarms, models, strict=True)]
    optimizers = [
        MoshpitSGD(own, inner(own.parameters()), averager, every=2, timeout=20.0, **HOWS[name])
        for own, averager in zip(models, averagers, strict=True)
    ]

    def train(number: int) -> list[RoundReport]:
        own, optimizer = models[number], optimizers[number]
        averagers[number].wait_for(3)
        found = []
        for step in range(60):
            x = torch.randn(8, SIDE) * (float("nan") if (number, step) == (SICK, AT) else 1.0)
            optimizer.zero_grad()
            own(x).square().mean().backward()
            found.append(optimizer.step(weight=8))
        return [one for one in (*found, optimizer.finish()) if one is not None]

    reports = all_do(3, train)
    sick = [one for one in reports[SICK] if one.left_out]
    # A delayed round that began before heals it as it ends, so that none is without it.
    assert any(one.kept > 0 for one in sick) or "delayed" in HOWS[name], "nothing was lost"
    assert not any(one.left_out for own in reports for one in own[-5:])
    assert not any(one.left_out for own in (reports[0], reports[2]) for one in own)
    for own, optimizer in zip(models, optimizers, strict=True):
        assert all(
            bool(one.isfinite().all()) for one in (*own.parameters(), *optimizer._replica.anchor)
        )
        assert are_finite(optimizer.state.values())
        if optimizer._replica.outer is not None:
            assert are_finite(optimizer._replica.outer.state.values())


@pytest.mark.parametrize("how", [{}, {"average": "pseudo-gradients"}], ids=["means", "pseudo"])
@pytest.mark.parametrize("delayed", [False, True])
def test_a_round_that_fails_is_no_step_of_the_outer_optimizer(
    how: dict[str, Any], delayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local steps stay, and the next round has them as well."""
    own, optimizer, close = alone(outer=outer, delayed=delayed, **how)
    failed = RoundReport(3, (0, 1), (1,), 0.0, 1.0, 0.0, 0.1, "the directory was lost")
    monkeypatch.setattr(optimizer._averager, "step_on", lambda *rest, **how: failed)
    try:
        expected = copy.deepcopy(own)
        alike = inner(expected.parameters())
        anchor = [one.clone() for one in optimizer._replica.anchor]
        for step in range(3):
            for trained, using in ((own, optimizer), (expected, alike)):
                using.zero_grad()
                backward(trained, 0, step)
                using.step()
        assert optimizer.finish() == (failed if delayed else None)
        torch.testing.assert_close(parameters(own), parameters(expected), rtol=0, atol=0)
        torch.testing.assert_close(optimizer._replica.anchor, anchor, rtol=0, atol=0)
        assert optimizer._replica.outer is not None
        assert not optimizer._replica.outer.state
    finally:
        close()


def test_a_sick_peer_has_the_outer_parameters_after_a_round_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, optimizer, close = alone(outer=outer)
    failed = RoundReport(3, (0, 1), (), 0.0, 1.0, 0.0, 0.1, "all are sick", left_out="sick")
    monkeypatch.setattr(optimizer._averager, "step_on", lambda *rest, **how: failed)
    try:
        before = parameters(own)
        with torch.no_grad():
            next(own.parameters())[0] = float("nan")
        backward(own, 0, 0)
        optimizer.step()
        for one, other in zip(parameters(own), before, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert are_finite(optimizer.state.values())
    finally:
        close()


def test_a_peer_that_is_healed_in_part_takes_no_step_until_it_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step by gradients that aren't finite would undo what the round has healed."""
    own, optimizer, close = alone(every=2)
    healthy = parameters(own)
    reports = iter(["sick", "sick", "", ""])
    try:

        def heal(tensors: list[torch.Tensor], *rest: Any, **how: Any) -> RoundReport:
            """All but the last tensor in the first round, and all in the second."""
            left = next(reports)
            if left:
                for tensor, value in zip(tensors[: 3 + heal.rounds], healthy, strict=False):
                    tensor.copy_(value)
            heal.rounds += 1
            return RoundReport(heal.rounds, (0, 1), (), 1.0, 0.1, 0.0, 0.1, left_out=left)

        heal.rounds = 0  # type: ignore[attr-defined]
        monkeypatch.setattr(optimizer._averager, "step_on", heal)
        with torch.no_grad():
            for one in own.parameters():
                one.fill_(float("nan"))
        sick = []
        for step in range(8):
            optimizer.zero_grad()
            backward(own, 0, step)
            optimizer.step()
            sick.append([not bool(one.isfinite().all()) for one in own.parameters()])
        assert sick[1] == sick[2] == [False, False, False, True]
        assert not any(any(one) for one in sick[3:])
        assert not optimizer._replica.is_sick
        for one, other in zip(parameters(own), healthy, strict=True):
            assert not torch.equal(one, other), "it trains on"
    finally:
        close()


@pytest.mark.parametrize("how", [{}, {"delayed": True}], ids=["means", "delayed"])
def test_a_grad_scaler_keeps_no_sick_peer_from_the_round_that_heals_it(
    how: dict[str, Any], made: Make
) -> None:
    """By itself it skips all of a step whose gradients aren't finite: of such a peer each one."""
    swarms = made(3)
    models = [nn.Linear(8, 4) for _ in swarms]
    averagers = [MoshpitAverager(s, m.parameters()) for s, m in zip(swarms, models, strict=True)]
    optimizers = [
        MoshpitSGD(own, inner(own.parameters()), averager, every=2, timeout=20.0, **how)
        for own, averager in zip(models, averagers, strict=True)
    ]

    def train(number: int) -> list[RoundReport]:
        own, optimizer, found = models[number], optimizers[number], []
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        averagers[number].wait_for(3)
        for step in range(20):
            if (number, step) == (SICK, AT):
                nn.init.constant_(own.weight, float("nan"))
            optimizer.zero_grad()
            scaler.scale(own(torch.randn(8, 8)).square().mean()).backward()
            found.append(scaler.step(optimizer, weight=8))
            scaler.update()
        return [one for one in (*found, optimizer.finish()) if one is not None]

    reports = all_do(3, train)
    assert {len(own) for own in reports} == {10}
    assert all(len(one.members) == 3 for own in reports for one in own)
    # A delayed round that began before heals it as it ends.
    assert "delayed" in how or any(one.left_out for one in reports[SICK])
    assert not any(one.left_out for one in reports[SICK][-5:])
    for own, optimizer in zip(models, optimizers, strict=True):
        assert all(bool(one.isfinite().all()) for one in own.parameters())
        assert are_finite(optimizer.state.values())
