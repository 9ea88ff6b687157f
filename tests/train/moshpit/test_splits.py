"""Training that goes on in both parts of a swarm, and what peers have when they are one again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

from lossycoll import MoshpitAverager, MoshpitSGD, Swarm
from lossycoll.runtime.keys.secret import secret_of
from tests.support import halves
from tests.support.swarms import SECRET
from tests.support.waiting import until
from tests.train.moshpit.test_sgd import backward, model

PEERS = 4


class Training:
    """Peers of one directory, which listen to no other."""

    def __init__(self, stack: ExitStack, place: tuple[str, int], **how: Any) -> None:
        join = [f"{place[0]}:{place[1]}"]
        self.swarms = [
            stack.enter_context(Swarm(join=join, secret=SECRET, name=str(n), may_serve=False))
            for n in range(PEERS)
        ]
        self.models = [model() for _ in range(PEERS)]
        self.optimizers = [
            MoshpitSGD(
                own,
                torch.optim.SGD(own.parameters(), lr=0.1),
                MoshpitAverager(swarm, own.parameters()),
                timeout=30.0,
                **how,
            )
            for own, swarm in zip(self.models, self.swarms, strict=True)
        ]

    def step(self, peers: Sequence[int], count: int, *, learns: bool = True) -> list[Any]:
        """So many steps of these peers, and rounds of just them."""
        reports: list[Any] = []

        def work(peer: int) -> None:
            for step in range(count):
                self.optimizers[peer].zero_grad()
                if learns:
                    backward(self.models[peer], peer, step)
                reports.append(self.optimizers[peer].step(weight=peer + 1.0))

        threads = [threading.Thread(target=work, args=(peer,)) for peer in peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(reports) == count * len(peers)
        assert {(one.failure, len(one.members)) for one in reports} == {("", len(peers))}
        return reports

    def values(self, peer: int) -> np.ndarray[Any, Any]:
        parts = [one.detach().numpy().reshape(-1) for one in self.models[peer].parameters()]
        return np.concatenate(parts)

    def spread(self, peers: Sequence[int] = range(PEERS)) -> float:
        """How far they are from one another, at most."""
        return float(np.ptp([self.values(peer) for peer in peers], axis=0).max())


def outer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.5, nesterov=True)


@pytest.mark.parametrize("how", [{}, {"outer": outer}], ids=["means", "outer"])
def test_training_through_a_split(
    how: dict[str, Any], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves.hurry(monkeypatch)
    secret = secret_of(SECRET)
    one = halves.directory(stack, secret)
    training = Training(stack, halves.place(one), **how)
    training.step(range(PEERS), 3)
    assert training.spread() < 1e-5
    two = halves.directory(stack, secret, training.swarms[0].member.session)
    halves.divide([swarm.member for swarm in training.swarms[2:]], two)
    until(lambda: halves.names(one) == {"0", "1"})
    rounds = [training.step(part, 4)[-1].round for part in ((0, 1), (2, 3))]
    assert training.spread((0, 1)) < 1e-5
    assert training.spread((2, 3)) < 1e-5
    apart = training.spread()
    assert apart > 1e-3
    halves.heal(two, one)
    halves.heal(one, two)
    until(lambda: len(halves.names(one)) == PEERS or len(halves.names(two)) == PEERS)
    for swarm in training.swarms:
        assert len(swarm.peers()) == PEERS
    before = [training.values(peer) for peer in range(PEERS)]
    (first, *_) = training.step(range(PEERS), 1, learns=False)
    assert first.round > max(rounds)
    if how:
        assert 0 < training.spread() < 0.7 * apart
        training.step(range(PEERS), 12, learns=False)
    else:
        wanted = np.average(before, axis=0, weights=[1.0, 2.0, 3.0, 4.0])
        np.testing.assert_allclose(training.values(0), wanted, rtol=0, atol=1e-5)
    assert training.spread() < 0.02 * apart
    training.step(range(PEERS), 2)
