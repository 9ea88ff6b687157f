"""Training in a swarm: what peers have after each step is what the papers' algorithms say."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lossycoll
from lossycoll import MoshpitAverager, MoshpitSGD, Swarm
from lossycoll.devices import registry
from lossycoll.train.moshpit import sgd
from tests.support import fake_device
from tests.support.swarms import SECRET, all_do

PEERS = 3
STEPS = 12
NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def outer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **NESTEROV)  # type: ignore[arg-type]


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def batch(peer: int, step: int) -> tuple[Tensor, Tensor]:
    data = torch.Generator().manual_seed(1000 * peer + step)
    return torch.randn(8, 5, generator=data), torch.randn(8, 2, generator=data)


def inner(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def backward(trained: nn.Module, peer: int, step: int) -> None:
    inputs, targets = batch(peer, step)
    nn.functional.mse_loss(trained(inputs), targets).backward()


def train(swarms: Sequence[Swarm], **how: Any) -> tuple[list[nn.Module], list[list[Any]]]:
    """Each peer's model after all steps, and what each of its steps returned."""
    models = [model() for _ in swarms]
    reports: list[list[Any]] = [[] for _ in swarms]
    barrier = threading.Barrier(len(swarms))

    def work(peer: int) -> None:
        own = models[peer]
        averager = MoshpitAverager(swarms[peer], own.parameters(), grid=(len(swarms),))
        optimizer = MoshpitSGD(own, inner(own.parameters()), averager, timeout=30.0, **how)
        barrier.wait()
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(own, peer, step)
            reports[peer].append(optimizer.step(weight=peer + 1.0))
        reports[peer].append(optimizer.finish())

    all_do(len(swarms), work)
    for one in (report for own in reports for report in own if report is not None):
        assert (one.failure, one.kept, len(one.members)) == ("", 0.0, len(swarms))
    return models, reports


def weighted(values: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """By tensor the mean over peers, of whom the nth counts n + 1."""
    total = sum(range(1, len(values) + 1))
    return [
        sum((peer + 1) * one for peer, one in enumerate(same)) / total  # type: ignore[misc]
        for same in zip(*values, strict=True)
    ]


def parameters(of: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in of.parameters()]


def expected(every: int, *, has_outer: bool = False, delayed: bool = False) -> list[nn.Module]:
    """Algorithm 2 of Moshpit SGD with one group of all; of DiLoCo, where there is an outer one."""
    models = [model() for _ in range(PEERS)]
    optimizers = [inner(one.parameters()) for one in models]
    anchors = [parameters(one) for one in models]
    outers = [outer(anchor) for anchor in anchors]
    waiting: list[tuple[list[Tensor], list[Tensor]]] | None = None

    def take(found: list[tuple[list[Tensor], list[Tensor]]]) -> None:
        for peer, (before, means) in enumerate(found):
            ends = means
            if has_outer:
                for anchor, mean in zip(anchors[peer], means, strict=True):
                    anchor.grad = anchor - mean
                outers[peer].step()
                ends = anchors[peer]
            with torch.no_grad():
                for own, begin, end in zip(models[peer].parameters(), before, ends, strict=True):
                    own.add_(end - begin)

    for step in range(STEPS):
        for peer, one in enumerate(models):
            optimizers[peer].zero_grad()
            backward(one, peer, step)
            optimizers[peer].step()
        if (step + 1) % every:
            continue
        if waiting is not None:
            take(waiting)
        before = [parameters(one) for one in models]
        found = [(own, weighted(before)) for own in before]
        waiting = found if delayed else None
        if not delayed:
            take(found)
    if waiting is not None:
        take(waiting)
    return models


def assert_alike(found: Sequence[nn.Module], wanted: Sequence[nn.Module]) -> None:
    for one, other in zip(found, wanted, strict=True):
        for own, want in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(own, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("every", [1, 4])
def test_local_steps_and_means(every: int, swarms: list[Swarm]) -> None:
    models, reports = train(swarms, every=every)
    assert_alike(models, expected(every))
    assert_alike(models[1:], [models[0]] * (PEERS - 1))  # the last step ended with a round
    for own in reports:
        assert [report is not None for report in own] == [
            *((step + 1) % every == 0 for step in range(STEPS)),
            False,
        ]


def test_an_outer_optimizer(swarms: list[Swarm]) -> None:
    models, _ = train(swarms, every=4, outer=outer)
    assert_alike(models, expected(4, has_outer=True))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors of this process lie on a device whose copies are late and memory poisoned."""
    monkeypatch.setattr(registry, "HostMemory", registry.HostMemory)
    monkeypatch.setitem(registry.factories, "cpu", lambda _: pytest.fail("not installed"))
    fake_device.install()
    yield
    fake_device.synchronize()
    monkeypatch.undo()
    registry._devices.clear()


HOWS_ON_A_DEVICE: dict[str, dict[str, Any]] = {
    "means": {},
    "delayed": {"delayed": True},
    "outer, delayed": {"outer": outer, "delayed": True},
}


@pytest.mark.parametrize("name", HOWS_ON_A_DEVICE)
def test_models_on_a_device(name: str, fake: None, swarms: list[Swarm]) -> None:
    how = HOWS_ON_A_DEVICE[name]
    models, _ = train(swarms, every=4, **how)
    wanted = expected(4, has_outer="outer" in how, delayed="delayed" in how)
    assert_alike(models, wanted)


def test_gradients_on_a_device(fake: None, swarms: list[Swarm]) -> None:
    test_gradients_are_means_over_calls_and_peers(swarms)


@pytest.mark.parametrize("with_outer", [False, True])
def test_rounds_beside_the_next_steps(with_outer: bool, swarms: list[Swarm]) -> None:
    models, reports = train(swarms, every=4, delayed=True, outer=outer if with_outer else None)
    assert_alike(models, expected(4, has_outer=with_outer, delayed=True))
    for own in reports:  # each round is told at the end of the next one's steps
        assert [step for step, report in enumerate(own) if report is not None] == [7, 11, STEPS]


def test_gradients_are_means_over_calls_and_peers(swarms: list[Swarm]) -> None:
    models, reports = train(swarms, every=3, average="gradients")
    wanted = model()
    optimizer = inner(wanted.parameters())
    for first in range(0, STEPS, 3):
        found = []
        for peer in range(PEERS):
            wanted.zero_grad()
            for step in range(first, first + 3):
                backward(wanted, peer, step)
            found.append([p.grad.clone() / 3 for p in wanted.parameters() if p.grad is not None])
        for parameter, mean in zip(wanted.parameters(), weighted(found), strict=True):
            parameter.grad = mean
        optimizer.step()
    assert_alike(models, [wanted] * PEERS)
    assert [step for step, report in enumerate(reports[0]) if report is not None] == [2, 5, 8, 11]


def alone(**how: Any) -> tuple[nn.Module, MoshpitSGD, Callable[[], None]]:
    swarm = Swarm("127.0.0.1:0", secret=SECRET)
    own = model()
    averager = MoshpitAverager(swarm, own.parameters())
    return own, MoshpitSGD(own, inner(own.parameters()), averager, **how), swarm.close


def test_a_checkpoint_goes_on(tmp_path: Any) -> None:
    """Of the peer that wrote it, or of another one: the steps after it are the same."""
    how: dict[str, Any] = {"every": 2, "outer": outer}
    one, optimizer, close = alone(**how)
    other, reborn, close_other = alone(**how)
    try:
        for step in range(5):
            optimizer.zero_grad()
            backward(one, 0, step)
            optimizer.step()
        torch.save({"model": one.state_dict(), "sgd": optimizer.state_dict()}, tmp_path / "state")
        state = torch.load(tmp_path / "state", weights_only=True)
        other.load_state_dict(state["model"])
        reborn.load_state_dict(state["sgd"])
        for step in range(5, 9):
            for trained, using in ((one, optimizer), (other, reborn)):
                using.zero_grad()
                backward(trained, 0, step)
                using.step()
        assert_alike([other], [one])
    finally:
        close()
        close_other()


def test_what_a_checkpoint_cannot_be_of() -> None:
    _, plain, close = alone()
    _, with_outer, close_other = alone(outer=outer)
    try:
        with pytest.raises(lossycoll.OptionError, match="has an outer optimizer and this has none"):
            plain.load_state_dict(with_outer.state_dict())
        state = copy.deepcopy(with_outer.state_dict())
        state["anchor"][0] = torch.zeros(3)
        with pytest.raises(lossycoll.OptionError, match="of parameters of other shapes"):
            with_outer.load_state_dict(state)
        state = copy.deepcopy(with_outer.state_dict())
        state["anchor"][0].fill_(float("nan"))
        with pytest.raises(lossycoll.OptionError, match="outer parameters aren't finite"):
            with_outer.load_state_dict(state)
    finally:
        close()
        close_other()


def test_a_step_after_one_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ctrl-C, in a notebook: the round that it was in is forgotten."""
    own, optimizer, close = alone()

    def interrupted(*rest: Any, **how: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    try:
        monkeypatch.setattr(optimizer._averager, "step_on", interrupted)
        backward(own, 0, 0)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert optimizer.finish() is None
        report = optimizer.step()
        assert report is not None
        assert report.failure == ""
    finally:
        close()


def test_a_wait_that_was_interrupted_is_waited_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round beside the steps goes on: its change isn't lost."""
    own, optimizer, close = alone(delayed=True)

    def interrupted(rounds: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    try:
        backward(own, 0, 0)
        assert optimizer.step() is None
        monkeypatch.setattr(sgd, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.finish()
        report = optimizer.finish()
        assert report is not None
        assert report.failure == ""
        assert optimizer.finish() is None
    finally:
        close()


def test_what_cannot_be() -> None:
    own, optimizer, close = alone()
    try:
        averager = optimizer._averager
        inside = inner(own.parameters())
        for how, said in (
            ({"every": 0}, "every is 0, wanted 1 or more"),
            ({"every": 2.5}, "every is 2.5, wanted 1 or more"),
            ({"outer": lambda parameters: None}, "outer makes no optimizer, wanted outer=lambda"),
            ({"outer": inside}, "outer makes no optimizer, wanted outer=lambda"),
            ({"timeout": float("nan")}, "timeout is nan, wanted 0 to 1e\\+06 seconds"),
            ({"average": "both"}, "average is 'both', wanted one of parameters, gradients"),
            ({"average": "gradients", "delayed": True}, "outer, delayed, fragments"),
            ({"average": "gradients", "outer": outer}, "outer, delayed, fragments"),
        ):
            with pytest.raises(lossycoll.OptionError, match=said):
                MoshpitSGD(own, inside, averager, **how)  # type: ignore[arg-type]
        with pytest.raises(lossycoll.OptionError, match=r"number 0: .*wanted MoshpitAverager\("):
            MoshpitSGD(nn.Linear(3, 3), inside, averager)
        with pytest.raises(lossycoll.OptionError, match="4 tensors and the model 2 parameters"):
            MoshpitSGD(nn.Linear(5, 6), inside, averager)
        for optimizers, said in (
            ([], "optimizer is an empty list"),
            ([inside, inner(model().parameters())], "AdamW has no parameter of the model; make it"),
            (torch.optim.LBFGS(own.parameters()), "LBFGS, whose steps need a closure"),
        ):
            with pytest.raises(lossycoll.OptionError, match=said):
                MoshpitSGD(own, optimizers, averager)
        for seconds in (-1.0, float("inf")):
            with pytest.raises(lossycoll.OptionError, match=r"wanted 0 to 1e\+06 seconds"):
                averager.step(timeout=seconds)
            with pytest.raises(lossycoll.OptionError, match=r"wanted 0 to 1e\+06 seconds"):
                optimizer.catch_up(seconds)
        for wrong in (-1.0, float("nan")):
            with pytest.raises(lossycoll.OptionError, match="weight is"):
                optimizer.step(weight=wrong)
    finally:
        close()
    with pytest.raises(lossycoll.LossyError):
        optimizer.step()
