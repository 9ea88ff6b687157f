"""What people do first, and what goes wrong for them: over real sockets, each peer by a thread."""

from __future__ import annotations

import copy
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lossycoll
from lossycoll import MoshpitAverager, MoshpitSGD, Swarm
from tests.support.swarms import SECRET, Make, all_do, at_once
from tests.support.waiting import until
from tests.train.moshpit.test_sgd import backward, inner, model, outer


@pytest.mark.parametrize("order", ["swarm waits", "averager waits", "nobody waits"])
def test_a_full_grid_is_exact_whatever_the_order_of_the_calls(made: Make, order: str) -> None:
    swarms = made(8)
    values = [torch.full((500,), float(2**number)) for number in range(8)]

    def peer(number: int) -> Any:
        swarm = swarms[number]
        if order == "swarm waits":
            swarm.wait_for(8, 30.0)
        averager = MoshpitAverager(swarm, [values[number]], grid=(2, 2, 2))
        if order == "averager waits":
            averager.wait_for(8, 30.0)
        return [averager.step(timeout=30.0) for _ in range(3)]

    found = all_do(8, peer)
    assert all(not one.failure and one.absent == () for reports in found for one in reports), found
    for value in values:
        torch.testing.assert_close(value, torch.full((500,), 255 / 8), rtol=0, atol=1e-4)


def test_a_report_says_who_was_absent_and_why(made: Make) -> None:
    swarms = made(3)
    averagers = [MoshpitAverager(one, [torch.ones(40)]) for one in swarms]
    averagers[0].wait_for(2, 30.0)
    found = all_do(2, lambda number: averagers[number].step(timeout=30.0))
    for report in found:
        assert (report.failure, len(report.members)) == ("", 2)
        assert report.absent == (("2", "it hasn't said what it averages"),)


def test_rounds_of_others_end_before_the_directory_leaves_with_its_peer(made: Make) -> None:
    """The first peer has had its rounds, and closes, while two others have one to go."""
    swarms = made(4)
    values = [torch.full((500,), float(2**number)) for number in range(4)]
    averagers = [MoshpitAverager(swarms[n], [values[n]], grid=(2, 2)) for n in range(4)]
    averagers[0].wait_for(4, 30.0)
    assert not any(one.failure for one in at_once(*(one.step for one in averagers)))
    server = swarms[0]._server
    assert server is not None
    cells = {peer.name: peer.cell for peer in server._directory.peers.values()}
    partner = next(n for n in range(1, 4) if cells[str(n)] // 2 == cells["0"] // 2)
    late, later = (n for n in range(1, 4) if n != partner)
    first = at_once(averagers[0].step, averagers[partner].step)
    waits = threading.Thread(target=averagers[late].step)
    waits.start()
    close = threading.Thread(target=swarms[0].close)
    close.start()
    close.join(0.5)
    assert close.is_alive()
    last = averagers[later].step(timeout=30.0)
    waits.join(30.0)
    close.join(30.0)
    assert [one.failure for one in (*first, last)] == [""] * 3
    assert len(last.members) == 2
    assert last.absent == ()
    for value in values:
        torch.testing.assert_close(value, torch.full((500,), 15 / 4), rtol=0, atol=1e-4)


def test_fewer_that_average_the_same_than_wanted_are_an_error(made: Make) -> None:
    swarms = made(3)
    averager = MoshpitAverager(swarms[0], [torch.zeros(5)])
    with pytest.raises(lossycoll.RendezvousError, match="fewer than 2 peers average the same; 3"):
        averager.wait_for(2, 0.3)
    MoshpitAverager(swarms[1], [torch.zeros(5)])
    averager.wait_for(2, 10.0)
    swarms[0].wait_for(2, 10.0)


def test_settings_that_differ_are_named(made: Make) -> None:
    swarms, trained = made(2), [model(), model()]

    def make(number: int, **how: Any) -> MoshpitSGD:
        own = trained[number]
        averager = MoshpitAverager(swarms[number], own.parameters())
        return MoshpitSGD(own, inner(own.parameters()), averager, **how)

    make(0, every=10)
    for how, said in (
        ({"every": 5}, "every=5, wanted 10"),
        ({"every": 10, "average": "gradients"}, "average=gradients, wanted parameters"),
        ({"every": 10, "outer": outer}, "outer=SGD, wanted None"),
        ({"every": 10, "delayed": True}, "delayed=True, wanted False"),
        ({"every": 10, "fragments": 2}, "fragments=2, wanted 1"),
        ({"every_seconds": 5.0}, "every=1, wanted 10; every_seconds=5.0, wanted None"),
        ({"target_samples": 99}, "every=1, wanted 10; target_samples=99, wanted None"),
        ({"every": 10, "schedule": "cosine to 900"}, "schedule=cosine to 900, wanted not set"),
    ):
        with pytest.raises(lossycoll.RendezvousError, match=said):
            make(1, **how)
    make(1, every=10)


def test_another_schedule_or_optimizer_of_gradients_is_named(made: Make) -> None:
    swarms, trained = made(2), [model(), model()]

    def make(number: int, kind: Any, schedule: str) -> MoshpitSGD:
        own = trained[number]
        averager = MoshpitAverager(swarms[number], own.parameters())
        inside = kind(own.parameters(), lr=0.1)
        return MoshpitSGD(own, inside, averager, average="gradients", schedule=schedule)

    make(0, torch.optim.SGD, "cosine to 20000 samples")
    said = "schedule=cosine to 9000 samples, wanted cosine to 20000 samples"
    with pytest.raises(lossycoll.RendezvousError, match=said):
        make(1, torch.optim.SGD, "cosine to 9000 samples")
    with pytest.raises(lossycoll.RendezvousError, match="optimizer=AdamW, wanted SGD"):
        make(1, torch.optim.AdamW, "cosine to 20000 samples")
    make(1, torch.optim.SGD, "cosine to 20000 samples")
    for wrong in ("cosine, warm", "T=5", "line\n", "x" * 201):
        with pytest.raises(lossycoll.OptionError, match=r"schedule is .*, wanted at most 200"):
            make(1, torch.optim.SGD, wrong)


def test_a_sick_peer_is_healed_and_costs_the_others_nothing(
    made: Make, caplog: pytest.LogCaptureFixture
) -> None:
    swarms = made(3)
    values = [torch.full((40,), float(number)) for number in range(3)]
    values[1][7] = float("nan")
    averagers = [MoshpitAverager(swarms[n], [values[n]]) for n in range(3)]
    with caplog.at_level(logging.WARNING, "lossycoll"):
        found = all_do(len(averagers), lambda number: averagers[number].step(timeout=20.0))
    assert [(one.failure, one.kept) for one in found] == [("", 0.0)] * 3
    assert [bool(one.left_out) for one in found] == [False, True, False]
    for value in values:
        assert value.unique().tolist() == [1.0]
    assert len([one for one in caplog.records if "aren't finite" in one.message]) == 1


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (torch.optim.AdamW, {}),  # whose moments aren't finite either
        (torch.optim.AdamW, {"delayed": True}),
        (torch.optim.SGD, {"average": "pseudo-gradients", "outer": outer, "fragments": 2}),
        (torch.optim.AdamW, {"average": "gradients"}),
    ],
    ids=["moments", "delayed", "fragments", "gradients"],
)
def test_a_peer_is_healed_of_one_sick_batch(made: Make, kind: Any, how: dict[str, Any]) -> None:
    swarms = made(3)
    models = [nn.Linear(8, 4)]
    models += [copy.deepcopy(models[0]) for _ in swarms[1:]]
    averagers = [MoshpitAverager(s, m.parameters()) for s, m in zip(swarms, models, strict=True)]
    made_here = [
        MoshpitSGD(own, kind(own.parameters(), lr=0.01), averager, every=2, **how)
        for own, averager in zip(models, averagers, strict=True)
    ]

    def train(number: int) -> list[Any]:
        own, optimizer = models[number], made_here[number]
        averagers[number].wait_for(3)
        found = []
        for step in range(24):
            x = torch.randn(8, 8) * (float("nan") if number == 1 and step == 5 else 1.0)
            optimizer.zero_grad()
            own(x).square().mean().backward()
            assert (number, step) != (1, 5) or not own.weight.grad.isfinite().all()
            found.append(optimizer.step(weight=8))
        return [one for one in [*found, optimizer.finish()] if one is not None]

    reports = all_do(3, train)
    assert how.get("delayed") or any(one.left_out for one in reports[1])
    assert reports[1][-1].left_out == ""
    for own, optimizer in zip(models, made_here, strict=True):
        assert all(bool(one.isfinite().all()) for one in own.parameters())
        for kept in optimizer.state.values():
            assert all(bool(torch.as_tensor(one).isfinite().all()) for one in kept.values())
    if how.get("average") == "gradients":  # all have made the same steps
        for own in models[1:]:
            torch.testing.assert_close(own.weight, models[0].weight)


def test_a_newcomer_gets_in_beside_a_sick_peer(made: Make) -> None:
    """One of two is sick in each of its steps; a third comes and takes the state."""
    swarms, over = made(3), threading.Event()
    models = [nn.Linear(8, 4) for _ in swarms]
    optimizers = [made_one(swarm, own) for swarm, own in zip(swarms[:2], models, strict=False)]

    def train(number: int) -> None:
        while not over.is_set():
            x = torch.randn(8, 8) * (float("nan") if number else 1.0)
            optimizers[number].zero_grad()
            models[number](x).square().mean().backward()
            optimizers[number].step(weight=8)

    def come() -> Any:
        try:
            until(lambda: optimizers[0].round > 1)
            newcomer = made_one(swarms[2], models[2])
            return newcomer.catch_up(timeout=20.0), newcomer
        finally:
            over.set()

    *_, (caught, newcomer) = at_once(lambda: train(0), lambda: train(1), come)
    assert caught is not None
    assert newcomer.round > 1
    assert all(bool(one.isfinite().all()) for one in models[2].parameters())


def test_buffers_that_no_round_heals_are_named_once(
    made: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """A sample that isn't finite spoils the running statistics as well."""
    swarms = made(2)
    models = [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    averaged: list[Any] = [models[0].parameters(), models[1].parameters()]
    optimizers = [
        MoshpitSGD(own, inner(own.parameters()), MoshpitAverager(swarm, tensors), every=1)
        for own, swarm, tensors in zip(models, swarms, averaged, strict=True)
    ]

    def train(number: int) -> None:
        for step in range(3):
            x = torch.randn(8, 3) * (float("nan") if number == 1 and step == 0 else 1.0)
            optimizers[number].zero_grad()
            models[number](x).square().mean().backward()
            optimizers[number].step(weight=8)

    with caplog.at_level(logging.WARNING, "lossycoll"):
        all_do(2, train)
    assert all(bool(one.isfinite().all()) for one in models[1].parameters())
    assert not bool(models[1][1].running_var.isfinite().all())  # type: ignore[union-attr,operator]
    told = [one.message for one in caplog.records if "buffers of this peer" in one.message]
    assert len(told) == 1
    assert "1.running_mean, 1.running_var" in told[0]


def test_all_sick_is_a_failure_of_the_round_and_no_wait(made: Make) -> None:
    swarms = made(2)
    averagers = [MoshpitAverager(one, [torch.full((3,), float("inf"))]) for one in swarms]
    found = all_do(len(averagers), lambda number: averagers[number].step(timeout=20.0))
    assert [one.failure for one in found] == ["no peer of the round has a weight above 0"] * 2
    assert all(one.kept == 1.0 for one in found)


def test_what_others_do_is_no_error_of_a_step(made: Make) -> None:
    swarms = made(2)
    one, _ = (MoshpitAverager(swarm, [torch.zeros(3)]) for swarm in swarms)
    report = one.step(timeout=0.5)  # the other evaluates
    assert report.round == -1
    assert "no round began within 0.5 s" in report.failure
    assert "2 are there: 0, 1" in report.failure


def steps(optimizer: MoshpitSGD, own: nn.Module, count: int) -> list[Any]:
    out = []
    for step in range(count):
        optimizer.zero_grad()
        backward(own, 0, step)
        out.append(optimizer.step(weight=8))
    return out


def made_one(swarm: Swarm, own: nn.Module, **how: Any) -> MoshpitSGD:
    averager = MoshpitAverager(swarm, own.parameters())
    return MoshpitSGD(own, inner(own.parameters()), averager, timeout=20.0, **how)


def test_the_newer_checkpoint_wins_and_the_loser_takes_it(
    made: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer that comes first has the older one, and trains already."""
    with Swarm(name="writes") as alone:
        own = model()
        optimizer = made_one(alone, own)
        steps(optimizer, own, 2)
        optimizer.save(tmp_path / "old")
        steps(optimizer, own, 20)
        optimizer.save(tmp_path / "new")
    first, second = made(2)
    models = [model(), model()]
    a, b = made_one(first, models[0]), None
    a.load(tmp_path / "old")
    b = made_one(second, models[1])
    b.load(tmp_path / "new")
    assert b.catch_up(timeout=20.0) is None, "its own is the newest"
    with caplog.at_level(logging.WARNING, "lossycoll"):
        found = at_once(lambda: steps(a, models[0], 3), lambda: steps(b, models[1], 4))
    told = [one for one in found[0] if one.newer]
    assert told, found
    assert told[0].newer == 22 * 8
    assert any("takes the newer one" in one.message for one in caplog.records)
    assert min(a.samples, b.samples) >= 22 * 8
    assert a.state_dict()["steps"] > 20


def test_peers_with_equal_checkpoints_begin_at_once(made: Make, tmp_path: Path) -> None:
    with Swarm(name="writes") as alone:
        own = model()
        optimizer = made_one(alone, own)
        steps(optimizer, own, 4)
        optimizer.save(tmp_path / "state")
    swarms, models = made(3), [model() for _ in range(3)]
    optimizers = [made_one(*pair) for pair in zip(swarms, models, strict=True)]
    have_loaded = threading.Barrier(3)

    def begin(number: int) -> Any:
        optimizers[number].load(tmp_path / "state")
        have_loaded.wait()
        caught = optimizers[number].catch_up(timeout=20.0)
        return caught, steps(optimizers[number], models[number], 2)

    found = all_do(3, begin)
    for caught, reports in found:
        assert caught is None
        assert [(one.failure, len(one.members)) for one in reports] == [("", 3)] * 2


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["chainable", "closed form"])
def test_a_newcomer_follows_the_schedule_of_the_others(made: Make, when: str, kind: str) -> None:
    """Its scheduler is made before or after it catches up."""
    (swarm,), models, over = made(1), [model(), model()], threading.Event()

    def scheduled(optimizer: MoshpitSGD) -> Any:
        if kind == "chainable":
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.99**epoch)

    def train(own: nn.Module, optimizer: MoshpitSGD, scheduler: Any, is_over: Any) -> None:
        while not is_over():
            steps(optimizer, own, 1)
            while scheduler.last_epoch < optimizer.samples // 16:
                scheduler.step()

    first = made_one(swarm, models[0])
    rate = scheduled(first)
    train(models[0], first, rate, lambda: first.samples >= 160)

    def come() -> Any:
        try:
            optimizer = made_one(comes, models[1])
            early = scheduled(optimizer) if when == "before" else None
            assert optimizer.catch_up(timeout=20.0) is not None
            return optimizer, early or scheduled(optimizer)
        finally:
            over.set()

    with Swarm(join=[swarm.address], secret=SECRET, name="comes") as comes:
        _, (second, other) = at_once(lambda: train(models[0], first, rate, over.is_set), come)
        end = max(first.samples, second.samples) + 64
        pairs = (models[0], first, rate), (models[1], second, other)
        at_once(*(lambda one=one: train(*one, lambda: one[1].samples >= end) for one in pairs))
    assert first.samples == second.samples
    assert second.param_groups[0]["lr"] == pytest.approx(first.param_groups[0]["lr"])
    assert second.param_groups[0]["lr"] < 0.05


@pytest.mark.parametrize("average", ["parameters", "gradients"])
def test_buffers_are_means_of_the_peers(made: Make, average: str) -> None:
    """By the samples of each, and counts of batches stay each peer's own."""
    swarms = made(2)
    models = [nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)) for _ in swarms]
    models[1].load_state_dict(models[0].state_dict())

    def train(number: int) -> Any:
        own = models[number]
        averager = MoshpitAverager(swarms[number], own)
        optimizer = MoshpitSGD(own, inner(own.parameters()), averager, average=average, timeout=20)
        averager.wait_for(2)
        backward(own, number, 0)
        before = {name: one.clone() for name, one in own.named_buffers()}
        report = optimizer.step(weight=1.0 + 2 * number)
        return before, report

    found = all_do(2, train)
    assert [(report.failure, report.kept) for _, report in found] == [("", 0.0)] * 2
    for name in ("1.running_mean", "1.running_var"):
        first, second = (before[name] for before, _ in found)
        assert not torch.equal(first, second)
        for own in models:
            wanted = (first + 3 * second) / 4
            torch.testing.assert_close(dict(own.named_buffers())[name], wanted)
    for one, other in zip(*(own.parameters() for own in models), strict=True):
        torch.testing.assert_close(one, other)
    assert int(models[0][1].num_batches_tracked) == 1
