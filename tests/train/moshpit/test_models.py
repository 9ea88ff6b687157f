"""Models and optimizers as people have them: frozen, compiled, of 16 bits, with schedulers."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lossycoll import MoshpitAverager, MoshpitSGD, Swarm
from lossycoll.errors import CheckpointError, OptionError
from lossycoll.train.moshpit.checkpoint import load_model, load_optimizer, model_state
from tests.support.swarms import Make, all_do, at_once
from tests.train.moshpit.test_sgd import backward, inner, model


def trained(swarm: Swarm, own: nn.Module, optimizer: Any = None, **how: Any) -> MoshpitSGD:
    averager = MoshpitAverager(swarm, how.pop("averages", own.parameters()))
    inside = optimizer or inner([p for p in own.parameters() if p.requires_grad])
    return MoshpitSGD(own, inside, averager, **how)


def test_frozen_parameters_neither_travel_nor_change(swarm: Swarm) -> None:
    own = model()
    own[0].requires_grad_(False)  # type: ignore[index]
    before = own[0].weight.clone()  # type: ignore[index]
    optimizer = trained(swarm, own)
    backward(own, 0, 0)
    optimizer.step()
    assert torch.equal(own[0].weight, before)  # type: ignore[index]
    assert optimizer._averager.count == 2
    assert sorted(model_state(own)) == ["2.bias", "2.weight"]
    state = model_state(copy.deepcopy(own))
    load_model(own, state)
    with pytest.raises(OptionError, match=r"differ in 2 names, 0.bias, 0.weight among them"):
        load_model(model(), state)


def test_compiled_or_not_it_is_the_same_state() -> None:
    plain = model()
    whole, part = torch.compile(model()), model()
    part[0] = torch.compile(part[0])  # type: ignore[index,operator]
    for one in (whole, part):
        assert isinstance(one, nn.Module)
        assert any("_orig_mod." in name for name in one.state_dict())
        assert model_state(one).keys() == plain.state_dict().keys()
        load_model(one, model_state(plain))
        load_model(plain, model_state(one))


def test_compiled_and_plain_peers_have_a_round(made: Make) -> None:
    swarms, plain = made(2), [model(), model()]
    with torch.no_grad():
        for parameter in plain[1].parameters():
            parameter.add_(1.0)
    wanted = [(a + b) / 2 for a, b in zip(*(one.parameters() for one in plain), strict=True)]
    compiled = torch.compile(plain[0], backend="eager")
    still = {"lr": 0.0}

    def work(number: int) -> Any:
        own = (compiled, plain[1])[number]
        assert isinstance(own, nn.Module)
        optimizer = trained(swarms[number], own, torch.optim.SGD(own.parameters(), **still))
        optimizer._averager.wait_for(2)
        backward(own, number, 0)
        return optimizer.step()

    found = all_do(2, work)
    assert [(one.failure, len(one.members), one.kept) for one in found] == [("", 2, 0.0)] * 2
    for own in plain:
        for parameter, mean in zip(own.parameters(), wanted, strict=True):
            torch.testing.assert_close(parameter.detach(), mean.detach())


def test_a_newcomer_takes_adapters_and_keeps_its_own_frozen_base(made: Make) -> None:
    """LoRA: what is frozen doesn't travel."""
    swarms, models, over = made(2), [model(), model()], threading.Event()
    for number, own in enumerate(models):
        own[0].requires_grad_(False)  # type: ignore[index]
        own[0].weight.fill_(number)  # type: ignore[index]

    def first() -> None:
        optimizer = trained(swarms[0], models[0], timeout=20.0)
        step = 0
        while not over.is_set():
            backward(models[0], 0, step)
            optimizer.step()
            step += 1

    def second() -> Any:
        try:
            optimizer = trained(swarms[1], models[1], timeout=20.0)
            while (report := optimizer.catch_up(timeout=20.0)) is None:
                pass  # the first has had no round yet
            return report
        finally:
            over.set()

    _, report = at_once(first, second)
    assert (report.donors, report.in_step) == (1, True), report
    sent = sum(one.numel() * 4 for one in models[0].parameters() if one.requires_grad)
    assert report.bytes >= sent
    assert bool((models[1][0].weight == 1.0).all())  # type: ignore[index]
    assert not torch.equal(models[1][2].weight, model()[2].weight)  # type: ignore[index]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_torchs_muon_for_matrices_and_another_for_the_rest(made: Make) -> None:
    """A newcomer takes both optimizers' states, and trains on in rounds with the first."""
    swarms, models, over = made(2), [model(), model()], threading.Event()

    def optimizers(own: nn.Module) -> list[torch.optim.Optimizer]:
        matrices = [one for one in own.parameters() if one.dim() == 2]
        rest = [one for one in own.parameters() if one.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.02), inner(rest)]

    def train(number: int, optimizer: MoshpitSGD, rounds: int) -> list[Any]:
        reports: list[Any] = []
        while len(reports) < rounds or (number == 0 and not over.is_set()):
            optimizer.zero_grad()
            backward(models[number], number, len(reports))
            reports.append(optimizer.step(weight=8))
        return reports

    def first() -> Any:
        optimizer = trained(swarms[0], models[0], optimizers(models[0]), timeout=20.0)
        return train(0, optimizer, 0)

    def second() -> Any:
        try:
            optimizer = trained(swarms[1], models[1], optimizers(models[1]), timeout=20.0)
            while optimizer.catch_up(timeout=20.0) is None:
                pass
            kept = [set(one.state[next(iter(one.state))]) for one in optimizer._inner]
            return kept, train(1, optimizer, 4)
        finally:
            over.set()

    _, (kept, reports) = at_once(first, second)
    assert kept == [{"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"}]
    assert [(one.failure, len(one.members)) for one in reports] == [("", 2)] * 4


def test_buffers_are_averaged_with_a_module(swarm: Swarm) -> None:
    own = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = trained(swarm, own, averages=own)
    backward(own, 0, 0)
    assert optimizer.step() is not None
    assert optimizer._averager.count == 6 + 2  # not the count of batches, a whole number


def test_small_steps_of_16_bits_add_up(swarm: Swarm) -> None:
    """An outer step is smaller than bfloat16 can tell from 1."""
    own = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.ones_(own.weight)

    def outer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    optimizer = trained(swarm, own, torch.optim.SGD(own.parameters(), lr=1.0), outer=outer)
    for _ in range(50):
        own.weight.grad = torch.full_like(own.weight, 0.0625)
        optimizer.step()
    wanted = 1 - 50 * 0.01 * 0.0625
    assert (own.weight.float() - wanted).abs().max() < 0.005
    anchor = optimizer.state_dict()["anchor"][0]
    torch.testing.assert_close(anchor, torch.full((4, 4), wanted), rtol=0, atol=1e-3)


def test_it_is_an_optimizer_of_torch(swarm: Swarm) -> None:
    own = model()
    optimizer = trained(swarm, own, inner(own.parameters()))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    calls = []
    optimizer.register_step_pre_hook(lambda *given: calls.append(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    rates = []
    for _ in range(3):
        optimizer.zero_grad()
        inputs = torch.randn(8, 5)
        scaler.scale(own(inputs).pow(2).mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert len(calls) == 3
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < 0.05
    assert optimizer.round == 2
    assert optimizer.samples == 3
    assert len(optimizer.state) == 4


@pytest.mark.parametrize("clips", [False, True])
def test_gradients_of_each_call_are_scaled_and_clipped_alone(swarm: Swarm, clips: bool) -> None:
    """Though they add up over calls, while the scale grows; and a call that overflows is none."""
    own, alike = model(), model()
    rate = {"lr": 1.0}
    optimizer = trained(
        *(swarm, own, torch.optim.SGD(own.parameters(), **rate)), every=4, average="gradients"
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    expected = [torch.zeros_like(one) for one in alike.parameters()]
    for step in range(4):
        overflow = float("inf") if step == 2 else 1.0
        optimizer.zero_grad()
        scaler.scale(own(torch.ones(3, 5) * (step + 1)).pow(2).sum() * overflow).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            alike.zero_grad()
            alike(torch.ones(3, 5) * (step + 1)).pow(2).sum().backward()
            if clips:
                nn.utils.clip_grad_norm_(alike.parameters(), 1.0)
            for total, one in zip(expected, alike.parameters(), strict=True):
                total.add_(one.grad / 3)  # type: ignore[operator]
    for one, before, mean in zip(own.parameters(), alike.parameters(), expected, strict=True):
        torch.testing.assert_close(one.detach(), before.detach() - mean)


def test_several_optimizers_inside(swarm: Swarm) -> None:
    """As of Muon, which takes matrices alone."""
    own = model()
    parts = [
        torch.optim.SGD([p for p in own.parameters() if p.dim() == 2], lr=0.1),
        torch.optim.AdamW([p for p in own.parameters() if p.dim() == 1], lr=0.1),
    ]
    before = [p.detach().clone() for p in own.parameters()]
    optimizer = trained(swarm, own, parts)
    backward(own, 0, 0)
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(own.parameters(), before, strict=True))
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(OptionError, match="add the group to one of them"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_schedulers_and_new_groups_find_the_defaults_of_the_optimizer_inside(swarm: Swarm) -> None:
    own = model()
    own[0].requires_grad_(False)  # type: ignore[index]
    optimizer = trained(swarm, own)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    backward(own, 0, 0)
    optimizer.step(weight=np.int64(8))
    scheduler.step()
    assert optimizer.param_groups[0]["betas"][0] != 0.9, "its momentum is cycled"
    optimizer.add_param_group({"params": own[0].weight})  # type: ignore[index]
    assert [group["weight_decay"] for group in optimizer._inner[0].param_groups] == [0.01] * 2
    assert type(optimizer.state_dict()["samples"]) is int


def test_a_state_of_another_torch_is_taken_as_far_as_both_know_it() -> None:
    own, other = (inner(model().parameters()) for _ in range(2))
    state = other.state_dict()
    state["param_groups"][0].update(lr=1e-6, initial_lr=0.05, of_a_later_torch=True, eps=1e-5)
    del state["param_groups"][0]["maximize"]
    load_optimizer(own, state)
    (group,) = own.param_groups
    assert (group["lr"], group["eps"], group["maximize"]) == (0.05, 1e-5, False)
    assert "of_a_later_torch" not in group
    with pytest.raises(OptionError, match=r"groups have \[4\] parameters, wanted \[2\]"):
        load_optimizer(inner(nn.Linear(3, 3).parameters()), state)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["chainable", "closed form"])
def test_a_schedule_by_samples_goes_on(swarm: Swarm, tmp_path: Path, when: str, kind: str) -> None:
    """Made before or after the state was taken, it is where the other peer's is."""

    def scheduled(optimizer: MoshpitSGD) -> Any:
        if kind == "chainable":
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)

    def follow(optimizer: MoshpitSGD, scheduler: Any) -> None:
        while scheduler.last_epoch < optimizer.samples // 16:
            scheduler.step()

    own = model()
    optimizer = trained(swarm, own)
    scheduler = scheduled(optimizer)
    for step in range(20):
        optimizer.zero_grad()
        backward(own, 0, step)
        optimizer.step(weight=8)
        follow(optimizer, scheduler)
    optimizer.save(tmp_path / "state")
    with Swarm(name="restarted") as again:
        other = model()
        reborn = trained(again, other)
        early = scheduled(reborn) if when == "before" else None
        reborn.load(tmp_path / "state")
        late = early or scheduled(reborn)
        backward(other, 0, 0)
        reborn.step(weight=0)
        follow(reborn, late)
        assert reborn.samples == optimizer.samples == 160
        assert reborn.param_groups[0]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(("name", "wrong"), [("samples", -1), ("since", 10**18), ("samples", 1.5)])
def test_samples_of_a_checkpoint_that_cannot_be(
    swarm: Swarm, tmp_path: Path, name: str, wrong: Any
) -> None:
    own = model()
    optimizer = trained(swarm, own)
    state = optimizer._replica.state()
    state["training"][name] = wrong
    torch.save(state, tmp_path / "state")
    with pytest.raises(CheckpointError, match=f"has had {wrong!r} samples"):
        optimizer.load(tmp_path / "state")


def test_rounds_by_time(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    own, now = model(), [100.0]
    monkeypatch.setattr("lossycoll.train.moshpit.pace.time.monotonic", lambda: now[0])
    optimizer = trained(swarm, own, every_seconds=3.0)
    due = []
    for _ in range(9):
        now[0] += 1.0
        due.append(optimizer._pace.is_due(0))
    assert due == [False, False, True] * 3
    with pytest.raises(OptionError, match="every_seconds is 0"):
        trained(swarm, model(), every_seconds=0)
