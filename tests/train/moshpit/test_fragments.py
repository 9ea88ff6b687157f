"""Rounds of few bytes: fragments of a model, and pseudo-gradients in packets of few bits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lossycoll import MoshpitAverager, MoshpitSGD, OptionError, RendezvousError
from lossycoll.train.moshpit.averager import MOST_FRAGMENTS, Fragments
from tests.support.swarms import Make, all_do
from tests.support.waiting import until
from tests.train.moshpit.test_catch_up import Peer, joined
from tests.train.moshpit.test_sgd import (
    PEERS,
    STEPS,
    assert_alike,
    backward,
    inner,
    model,
    outer,
    parameters,
    train,
    weighted,
)

EVERY = 2
PSEUDO: dict[str, Any] = {"every": EVERY, "outer": outer, "average": "pseudo-gradients"}


# ---- which rows ----


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_fragments_have_each_value_once_and_equal_shares(count: int) -> None:
    shapes = [(6, 5), (6,), (2, 6), (), (3, 2, 2), (0, 4)]
    tensors = [torch.rand(shape) for shape in shapes]
    found = [torch.full_like(one, -1.0) for one in tensors]
    fragments = Fragments(count)
    sizes = []
    for part in range(count):
        values = fragments.gather(tensors, part)
        fragments.scatter(values, found, part)
        sizes.append(len(values))
    assert sum(sizes) == sum(one.numel() for one in tensors)
    assert all(torch.equal(*pair) for pair in zip(found, tensors, strict=True))
    big = [torch.zeros(64, 8), torch.zeros(64), torch.zeros(128, 8)]
    sizes = [len(fragments.gather(big, part)) for part in range(count)]
    assert max(sizes) - min(sizes) <= 8 + 1 + 8


def test_rounds_take_fragments_in_turn_and_meet_all_axes_of_a_grid() -> None:
    for count in range(1, 9):
        fragments = Fragments(count)
        turns = [fragments.of(number) for number in range(12 * count * count)]
        assert {turns.count(part) for part in range(count)} == {12 * count}
        for axes in range(1, 5):
            met = {(part, number % axes) for number, part in enumerate(turns)}
            assert len(met) == count * axes, (count, axes)


@pytest.mark.parametrize("count", [0, -1, MOST_FRAGMENTS + 1, 1.5, None, True])
def test_fragments_that_cannot_be(count: Any) -> None:
    with pytest.raises(OptionError, match="fragments"):
        Fragments(count)


def test_what_cannot_go_together(made: Make) -> None:
    (swarm,) = made(1)
    own = model()
    optimizer = inner(own.parameters())
    for how, said in (
        ({"average": "pseudo-gradients"}, "without outer"),
        ({"average": "gradients", "fragments": 2}, "fragments"),
        ({"fragments": 0}, "fragments is 0"),
    ):
        averager = MoshpitAverager(swarm, own.parameters())
        with pytest.raises(OptionError, match=said):
            MoshpitSGD(own, optimizer, averager, **how)  # type: ignore[arg-type]
    averager = MoshpitAverager(swarm, own.parameters(), max_norm=3.0)
    with pytest.raises(OptionError, match="max_norm"):
        MoshpitSGD(own, optimizer, averager, fragments=2)


def test_peers_of_other_fragments_are_refused_and_the_setting_is_named(made: Make) -> None:
    swarms, trained = made(2), [model(), model()]

    def make(number: int, **how: Any) -> MoshpitSGD:
        own = trained[number]
        averager = MoshpitAverager(swarms[number], own.parameters())
        return MoshpitSGD(own, inner(own.parameters()), averager, **{**PSEUDO, **how})

    make(0, fragments=3)
    with pytest.raises(RendezvousError, match="fragments=2, wanted 3"):
        make(1, fragments=2)
    with pytest.raises(RendezvousError, match="average=parameters, wanted pseudo-gradients"):
        make(1, fragments=3, average="parameters")
    make(1, fragments=3)


# ---- what training makes of them ----


def streaming(
    rounds: Sequence[int], count: int, *, has_outer: bool, delayed: bool = False
) -> list[nn.Module]:
    """Streaming DiLoCo with one group of all. ``rounds``: their numbers."""
    fragments, models = Fragments(count), [model() for _ in range(PEERS)]
    optimizers = [inner(one.parameters()) for one in models]
    anchors = [
        [[view.clone() for view in fragments.rows(parameters(one), p)] for p in range(count)]
        for one in models
    ]
    outers = [outer([one for part in own for one in part]) for own in anchors]
    waiting: tuple[int, list[list[Tensor]], list[Tensor]] | None = None

    def take(part: int, before: list[list[Tensor]], means: list[Tensor]) -> None:
        for peer, one in enumerate(models):
            ends = fragments.rows(means, part)
            if has_outer:
                for anchor, end in zip(anchors[peer][part], ends, strict=True):
                    anchor.grad = anchor - end
                outers[peer].step()
                outers[peer].zero_grad()
                ends = anchors[peer][part]
            own = fragments.rows([p.detach() for p in one.parameters()], part)
            begins = fragments.rows(before[peer], part)
            for view, begin, end in zip(own, begins, ends, strict=True):
                view.add_(end - begin)

    numbers = iter(rounds)
    for step in range(STEPS):
        for peer, one in enumerate(models):
            optimizers[peer].zero_grad()
            backward(one, peer, step)
            optimizers[peer].step()
        if (step + 1) % EVERY:
            continue
        if waiting is not None:
            take(*waiting)
        before = [parameters(one) for one in models]
        waiting = fragments.of(next(numbers)), before, weighted(before)
        if not delayed:
            take(*waiting)
            waiting = None
    if waiting is not None:
        take(*waiting)
    return models


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("how", ["parameters", "outer", "pseudo-gradients"])
def test_each_round_averages_another_fragment(how: str, delayed: bool, made: Make) -> None:
    """Of means, of DiLoCo and of pseudo-gradients: exact, where nothing is lost or rounded."""
    kinds: dict[str, dict[str, Any]] = {
        "parameters": {"every": EVERY},
        "outer": {"every": EVERY, "outer": outer},
        "pseudo-gradients": PSEUDO,
    }
    models, reports = train(made(3), fragments=2, delayed=delayed, **kinds[how])
    rounds = [one.round for one in reports[0] if one is not None]
    assert len(rounds) == STEPS // EVERY
    wanted = streaming(rounds, 2, has_outer=how != "parameters", delayed=delayed)
    assert_alike(models, wanted)
    assert not torch.equal(parameters(models[0])[0], parameters(models[1])[0]), "all was averaged"


def test_parameters_of_16_bits_keep_what_they_cannot_hold(made: Make) -> None:
    (swarm,) = made(1)
    own = model().bfloat16()
    averager = MoshpitAverager(swarm, own.parameters())
    optimizer = MoshpitSGD(own, torch.optim.SGD(own.parameters(), lr=0.0), averager, fragments=2)
    sums = [one.float() + 2**-12 * one.float().abs() for one in parameters(own)]
    with torch.no_grad():
        for part in range(2):
            optimizer._replica.add([], sums, part)
    for value, wanted in zip(optimizer._replica.values(), sums, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-7)


def test_lost_packets_cost_weight_and_another_fragment_nothing(made: Make) -> None:
    """What came is a mean of some peers' values, never scaled; the rest stays."""
    swarms = made(4, link="udp", inject="loss=0.2,seed=5", repair=0)
    fragments = Fragments(3)
    values = [[torch.full((300, 100), peer + 1.0)] for peer in range(4)]
    averagers = [
        MoshpitAverager(swarm, own, grid=(4,)) for swarm, own in zip(swarms, values, strict=True)
    ]
    reports = all_do(4, lambda peer: averagers[peer].step_on(values[peer], fragments=fragments))
    assert any(one.contributions < 4 or one.kept > 0 for one in reports), "nothing was lost"
    part = fragments.of(reports[0].round)
    possible = {
        sum(some) / len(some)
        for bits in range(1, 16)
        for some in [[peer + 1.0 for peer in range(4) if bits >> peer & 1]]
    }
    for peer, own in enumerate(values):
        inside = set(fragments.gather(own, part).tolist())
        assert all(min(abs(one - want) for want in possible) < 1e-5 for one in inside)
        for other in {0, 1, 2} - {part}:
            assert set(fragments.gather(own, other).tolist()) == {peer + 1.0}


@pytest.mark.parametrize("wire", ["int4", "int2"])
def test_each_fragments_rounding_is_made_up_for(wire: str, made: Make) -> None:
    """The same values in each round, and other ones in each fragment: sums of the means are as far
    off after many rounds as after a few."""
    swarms, fragments, rounds = made(3, link="udp"), Fragments(2), 40
    generator = torch.Generator().manual_seed(3)
    values = [[torch.randn(64, 64, generator=generator)] for _ in range(3)]
    exact = sum(own[0] for own in values) / 3  # type: ignore[arg-type]
    averagers = [
        MoshpitAverager(swarm, own, grid=(3,), wire=wire)
        for swarm, own in zip(swarms, values, strict=True)
    ]

    def work(peer: int) -> dict[int, tuple[int, Tensor]]:
        sums: dict[int, tuple[int, Tensor]] = {}
        for _ in range(rounds):
            tensors = [one.clone() for one in values[peer]]
            report = averagers[peer].step_on(tensors, fragments=fragments, timeout=30.0)
            assert (report.failure, report.kept) == ("", 0.0)
            part = fragments.of(report.round)
            count, total = sums.get(part, (0, torch.zeros(64, 64)))
            sums[part] = count + 1, total + tensors[0]
        return sums

    for part, (count, total) in all_do(3, work)[0].items():
        assert count == rounds // 2
        off = torch.from_numpy(fragments.gather([total / count - exact], part)).abs().mean()
        # One round of int4 is 0.1 off, of int2 0.3.
        assert float(off) < 0.06, (part, float(off))
    assert {len(one) for one in averagers[0].memory().values()} == {32 * 64}


def test_rounding_at_random_is_right_on_average(made: Make) -> None:
    swarms = made(2, link="udp", wire_rounding="stochastic")
    fragments, rounds = Fragments(2), 200
    values = [[torch.full((4, 128), 0.3)] for _ in range(2)]
    for own in values:
        own[0][:, 0], own[0][:, 1] = -1.0, 1.0  # the ends of the grid
    averagers = [
        MoshpitAverager(swarm, own, grid=(2,), wire="int2")
        for swarm, own in zip(swarms, values, strict=True)
    ]

    def work(peer: int) -> Tensor:
        total = torch.zeros(4, 128)
        for _ in range(rounds):
            tensors = [one.clone() for one in values[peer]]
            averagers[peer].step_on(tensors, fragments=fragments, timeout=30.0)
            total += tensors[0]
        return total / rounds

    # Rounded to the nearest of its grid 0.3 would be 1/3 in each.
    mean = all_do(2, work)[0][:, 2:].mean()
    assert float(mean) == pytest.approx(0.3, abs=0.01)
    assert averagers[0].memory() == {}


# ---- newcomers and checkpoints ----


def test_a_newcomer_between_two_fragments_has_the_others_outer_optimizer(stack: ExitStack) -> None:
    how = {**PSEUDO, "fragments": 3}
    first = joined(stack, "0")
    old = [Peer(first, "0", how, model), Peer(joined(stack, "1", first), "1", how, model)]
    for peer in old:
        peer.goes_on.clear()
        peer.slow = 0.02
    threads = [threading.Thread(target=peer.train, args=(11,)) for peer in old]
    for thread in threads:
        thread.start()
    until(lambda: all(len(peer.rounds) == 2 for peer in old))
    new = Peer(joined(stack, "2", first), "2", how, model)
    threads.append(threading.Thread(target=new.train, args=(11,), kwargs={"catches_up": True}))
    threads[-1].start()
    for peer in old:
        peer.goes_on.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert new.caught.in_step
    assert new.caught.round < 11
    states = [peer.optimizer.state_dict() for peer in (*old, new)]
    assert {state["steps"] for state in states} == {states[0]["steps"]}
    momenta = [
        [one["momentum_buffer"] for one in state["outer"]["state"].values()] for state in states
    ]
    assert len(momenta[0]) == len(states[0]["anchor"])
    for state, momentum in zip(states[1:], momenta[1:], strict=True):
        for one, other in zip(state["anchor"], states[0]["anchor"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for one, other in zip(momentum, momenta[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_has_the_rounding_of_its_peer_alone(made: Make, tmp_path: Path) -> None:
    swarms, models = made(2, link="udp"), [model(), model()]
    optimizers = []
    for swarm, own in zip(swarms, models, strict=True):
        averager = MoshpitAverager(swarm, own.parameters(), grid=(2,), wire="int4")
        optimizers.append(MoshpitSGD(own, inner(own.parameters()), averager, fragments=2, **PSEUDO))

    def work(peer: int) -> None:
        for step in range(2 * EVERY):
            optimizers[peer].zero_grad()
            backward(models[peer], peer, step)
            optimizers[peer].step()

    all_do(2, work)
    wanted = optimizers[0]._averager.memory()
    assert set(wanted) == {0, 1}
    assert all(bool(one.any()) for one in wanted.values()), "nothing was rounded"
    optimizers[0].save(tmp_path / "state")
    for optimizer in optimizers:
        optimizer._averager.remember({})
        optimizer.load(tmp_path / "state")
    found = optimizers[0]._averager.memory()
    assert all(torch.equal(found[part], one) for part, one in wanted.items())
    assert optimizers[1]._averager.memory() == {}  # the first one makes up for it


def test_a_memory_of_other_values_counts_nothing(made: Make) -> None:
    swarms = made(2, link="udp")
    values = [[torch.full((8, 8), float(peer))] for peer in range(2)]
    averagers = [
        MoshpitAverager(swarm, own, grid=(2,), wire="int8")
        for swarm, own in zip(swarms, values, strict=True)
    ]
    for one in averagers:
        one.remember({0: torch.full((3,), 9.0)})
    all_do(2, lambda peer: averagers[peer].step(timeout=30.0))
    assert np.allclose(values[0][0].numpy(), 0.5, atol=0.01)
