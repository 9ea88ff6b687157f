"""Newcomers in the middle of a training: they have the others' state, and nobody stops for them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lossycoll import MoshpitAverager, MoshpitSGD, Swarm
from lossycoll.errors import (
    CheckpointError,
    EngineError,
    OperationTimeout,
    OptionError,
    RendezvousError,
)
from lossycoll.runtime.swarm.state_transfer import TransferredState
from lossycoll.train.moshpit.newcomer import Newcomer
from tests.support.swarms import SECRET
from tests.support.waiting import until
from tests.train.moshpit.test_sgd import backward, inner, model, outer

HOWS: dict[str, dict[str, Any]] = {
    "parameters": {"every": 3},
    "outer": {"every": 3, "outer": outer},
    "gradients": {"every": 2, "average": "gradients"},
}


class Peer:
    """One that trains on a thread of its own."""

    def __init__(self, swarm: Swarm, name: str, how: dict[str, Any], made: Callable[[], nn.Module]):
        self.name = name
        self.model = made()
        averager = MoshpitAverager(swarm, self.model.parameters())
        self.optimizer = MoshpitSGD(
            self.model, inner(self.model.parameters()), averager, timeout=40.0, **how
        )
        self.rounds: dict[int, tuple[list[Tensor], Any]] = {}
        """After each: the parameters, and its report."""
        self.steps: dict[int, int] = {}
        self.caught: Any = None
        self.goes_on = threading.Event()
        """After its second round it waits for this."""
        self.goes_on.set()
        self.stops = threading.Event()
        self.slow = 0.0

    def train(self, until: int, *, catches_up: bool = False) -> None:
        """Until it has had the round of that number."""
        step = 0
        if catches_up:
            self.caught = self.optimizer.catch_up(timeout=40.0)
            assert self.caught is not None
            self.note(self.caught.round, None)
        while not self.stops.is_set() and (not self.rounds or max(self.rounds) < until):
            time.sleep(self.slow)
            self.optimizer.zero_grad()
            backward(self.model, int(self.name), step)
            report = self.optimizer.step()
            step += 1
            if report is not None:
                self.note(report.round, report)
                if len(self.rounds) == 2 and not catches_up:
                    assert self.goes_on.wait(40)

    def note(self, number: int, report: Any) -> None:
        values = [p.detach().clone() for p in self.model.parameters()]
        self.steps[number] = self.optimizer.state_dict()["steps"]
        self.rounds[number] = values, report


def joined(stack: ExitStack, name: str, first: Swarm | None = None) -> Swarm:
    if first is None:
        return stack.enter_context(Swarm("127.0.0.1:0", secret=SECRET, name=name))
    return stack.enter_context(Swarm(join=[first.address], secret=SECRET, name=name))


def other_model() -> nn.Module:
    torch.manual_seed(99)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def without(stack: ExitStack, how: dict[str, Any], last: int) -> list[Peer]:
    """Two peers that nobody joins."""
    first = joined(stack, "0")
    peers = [Peer(first, "0", how, model), Peer(joined(stack, "1", first), "1", how, model)]
    threads = [threading.Thread(target=peer.train, args=(last,)) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return peers


@pytest.mark.parametrize("at_rest", [False, True])
@pytest.mark.parametrize("how", HOWS)
def test_a_newcomer_goes_on_as_the_others(
    stack: ExitStack, how: str, at_rest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its first round, of weight 0, it has what they have; and they had their rounds
    meanwhile as ever. From then on it counts. With ``at_rest`` the state is one from between a
    round and the next step."""
    first = joined(stack, "0")
    old = [
        Peer(first, "0", HOWS[how], model),
        Peer(joined(stack, "1", first), "1", HOWS[how], model),
    ]
    last = 12
    for peer in old:
        peer.goes_on.clear()
    threads = [threading.Thread(target=peer.train, args=(last,)) for peer in old]
    for thread in threads:
        thread.start()
    while min(len(peer.rounds) for peer in old) < 2:
        assert threads[0].is_alive()
    new = Peer(joined(stack, "2", first), "2", HOWS[how], other_model)

    def go_on() -> None:
        for peer in old:
            peer.goes_on.set()

    def fetch_state(*given: Any) -> Any:
        taken = fetches(*given)
        go_on()
        return taken

    fetches = MoshpitAverager.fetch_state
    if at_rest:
        monkeypatch.setattr(MoshpitAverager, "fetch_state", fetch_state)
    else:
        go_on()
    new.train(last, catches_up=True)
    for thread in threads:
        thread.join(60)
    begins = new.caught.round
    for number in range(begins, last + 1):
        values = [peer.rounds[number][0] for peer in (*old, new)]
        for same in zip(*values, strict=True):
            torch.testing.assert_close(same[2], same[0])
            torch.testing.assert_close(same[1], same[0])
        # Its schedules go on as theirs, too.
        assert len({peer.steps[number] for peer in (*old, new)}) == 1
    assert begins < last
    expected = without(stack, HOWS[how], begins)[0].rounds[begins][0]
    torch.testing.assert_close(old[0].rounds[begins][0], expected)  # the newcomer changed nothing
    report = old[0].rounds[begins][1]
    assert len(report.members) == 3
    later = old[0].rounds[last][1]
    assert (len(later.members), later.contributions) == (3, 3.0)


@pytest.mark.parametrize("how", HOWS)
def test_rounds_pass_while_the_state_comes(
    stack: ExitStack, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the round brings all that peers have in common, no other state is taken for it."""
    first = joined(stack, "0")
    old = Peer(first, "0", HOWS[how], model)
    thread = threading.Thread(target=old.train, args=(10**6,))
    thread.start()
    until(lambda: len(old.rounds) > 2, seconds=20)
    fetches, states = MoshpitAverager.fetch_state, []

    def fetch_state(*given: Any) -> Any:
        states.append(fetches(*given))
        if len(states) == 1:
            had = len(old.rounds)
            until(lambda: len(old.rounds) > had + 3, seconds=20)
            old.slow = 0.5  # so that no more pass while the next one comes
        return states[-1]

    monkeypatch.setattr(MoshpitAverager, "fetch_state", fetch_state)
    new = Peer(joined(stack, "1", first), "1", HOWS[how], other_model)
    new.caught = new.optimizer.catch_up(timeout=40.0)
    old.stops.set()
    assert new.caught is not None
    new.note(new.caught.round, None)
    number = new.caught.round
    until(lambda: number in old.rounds, seconds=20)
    assert new.caught.in_step
    assert (len(states) == 1) == (how == "parameters")
    for mine, theirs in zip(new.rounds[number][0], old.rounds[number][0], strict=True):
        torch.testing.assert_close(mine, theirs)
    assert new.steps[number] == old.steps[number]
    thread.join(60)


def test_a_first_round_that_fails_loses_no_report(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is newer at the second try, as the state was taken at the first."""
    first = joined(stack, "0")
    old = Peer(first, "0", HOWS["parameters"], model)
    old.goes_on.clear()
    thread = threading.Thread(target=old.train, args=(6,))
    thread.start()
    until(lambda: len(old.rounds) == 2)
    new = Peer(joined(stack, "1", first), "1", HOWS["parameters"], other_model)
    joins, tries = Newcomer.join_in, 0

    def join_in(newcomer: Newcomer, timeout: float) -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            return dataclasses.replace(old.rounds[1][1], failure="a link is dead")
        old.goes_on.set()
        return joins(newcomer, timeout)

    monkeypatch.setattr(Newcomer, "join_in", join_in)
    caught = new.optimizer.catch_up(timeout=40.0)
    new.stops.set()
    assert caught is not None
    assert (tries, caught.tries, caught.bytes > 0) == (2, 1, True)
    thread.join(60)


@pytest.mark.parametrize("comes", [True, False])
def test_donors_that_cannot_be_reached_are_no_reason_to_begin(
    stack: ExitStack, comes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory names them no more for a while; there is a state all the same."""
    first = joined(stack, "0")
    old = Peer(first, "0", HOWS["parameters"], model)
    thread = threading.Thread(target=old.train, args=(10**6,))
    thread.start()
    stack.callback(thread.join)
    stack.callback(old.stops.set)
    until(lambda: len(old.rounds) > 1)
    new = Peer(joined(stack, "1", first), "1", HOWS["parameters"], other_model)
    fetches, tries = MoshpitAverager.fetch_state, 0

    def fetch_state(*given: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise EngineError("peer 1: no route to peer 0")
        return fetches(*given) if comes and tries > 3 else None

    monkeypatch.setattr(MoshpitAverager, "fetch_state", fetch_state)
    if comes:
        caught = new.optimizer.catch_up(timeout=40.0)
        assert caught is not None
        assert caught.donors == 1
    else:
        with pytest.raises(EngineError, match="no route to peer 0"):
            new.optimizer.catch_up(timeout=1.0)
    assert tries > 3


def test_a_donor_that_has_gone_is_not_waited_for(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Peer(joined(stack, "0"), "0", HOWS["parameters"], model)
    until(lambda: new.optimizer._averager.peers == 1)
    found: list[Any] = [EngineError("the other end of a transfer has gone"), None]

    def fetch_state(*given: Any) -> Any:
        one = found.pop(0)
        if one is not None:
            raise one

    monkeypatch.setattr(MoshpitAverager, "fetch_state", fetch_state)
    with pytest.raises(EngineError, match="has gone"):
        new.optimizer.catch_up(timeout=600.0)


def test_an_own_state_as_new_as_the_others_is_taken_for_that_whatever_failed(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Peer(joined(stack, "0"), "0", HOWS["parameters"], model)
    found = [EngineError("peer 0: no route to peer 1")]

    def fetch_state(averager: MoshpitAverager, own: Any, *rest: Any) -> Any:
        if found:
            raise found.pop()
        return TransferredState(own, 0, 0)

    monkeypatch.setattr(MoshpitAverager, "fetch_state", fetch_state)
    assert new.optimizer.catch_up(timeout=600.0) is None


def test_nobody_has_a_state_yet(stack: ExitStack) -> None:
    first = joined(stack, "0")
    peer = Peer(first, "0", HOWS["parameters"], model)
    Peer(joined(stack, "1", first), "1", HOWS["parameters"], model)
    assert peer.optimizer.catch_up(timeout=20.0) is None


def test_one_that_comes_back_takes_what_has_changed(stack: ExitStack) -> None:
    """Embeddings that no batch has touched are equal: they don't come again."""

    def large() -> nn.Module:
        torch.manual_seed(7)
        made = model()
        made.register_buffer("table", torch.arange(1 << 20, dtype=torch.float32))
        return made

    how = {"every": 1}
    first = joined(stack, "0")
    stays = Peer(first, "0", how, large)
    thread = threading.Thread(target=stays.train, args=(400,))
    thread.start()
    while not stays.rounds:
        assert thread.is_alive()
    fresh = Peer(joined(stack, "1", first), "1", how, other_large)
    report = fresh.optimizer.catch_up(timeout=40.0)
    assert report is not None
    assert report.bytes >= 4 << 20
    again = Peer(joined(stack, "2", first), "2", how, large)
    report = again.optimizer.catch_up(timeout=40.0)
    assert report is not None
    assert report.bytes <= report.tries * (2 << 20)
    stays.stops.set()
    thread.join(60)
    assert not thread.is_alive()


def other_large() -> nn.Module:
    made = other_model()
    made.register_buffer("table", torch.zeros(1 << 20))
    return made


@pytest.mark.parametrize("kind", ["outer", "inner"])
def test_the_state_of_another_optimizer_is_refused(stack: ExitStack, kind: str) -> None:
    """The directory compares settings, and the state shows the rest. The newcomer keeps its own."""
    first = joined(stack, "0")
    Peer(first, "0", {"every": 1}, model).train(1)
    swarm, own = joined(stack, "1", first), other_model()
    how: dict[str, Any] = {"outer": outer} if kind == "outer" else {}
    optimizer = inner(own.parameters())
    if kind == "inner":
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    averager = MoshpitAverager(swarm, own.parameters())
    if kind == "outer":
        with pytest.raises(RendezvousError, match="outer=SGD, wanted None"):
            MoshpitSGD(own, optimizer, averager, timeout=20.0, **how)
        return
    new = MoshpitSGD(own, optimizer, averager, timeout=20.0, **how)
    with pytest.raises(CheckpointError, match="AdamW"):
        new.catch_up(timeout=20.0)
    for mine, before in zip(own.parameters(), other_model().parameters(), strict=True):
        assert torch.equal(mine, before)


def test_others_that_have_no_further_round(stack: ExitStack) -> None:
    """A newcomer is no group by itself."""
    first = joined(stack, "0")
    Peer(first, "0", {"every": 1}, model).train(1)
    new = Peer(joined(stack, "1", first), "1", {"every": 1}, model)
    with pytest.raises(OperationTimeout):
        new.optimizer.catch_up(timeout=3.0)


def test_others_whose_rounds_are_far_apart(stack: ExitStack) -> None:
    """It waits for the next one; they don't wait for it."""
    first = joined(stack, "0")
    peers = [Peer(first, str(i), {"every": 1}, model) for i in range(1)]
    peers += [Peer(joined(stack, "1", first), "1", {"every": 1}, model)]
    stop, times = threading.Event(), []

    def train(peer: Peer) -> None:
        while not stop.is_set():
            backward(peer.model, int(peer.name), 0)
            began = time.monotonic()
            peer.note(10**6, peer.optimizer.step())
            times.append(time.monotonic() - began)
            stop.wait(2.5)

    threads = [threading.Thread(target=train, args=(peer,)) for peer in peers]
    for thread in threads:
        thread.start()
    until(lambda: len(times) >= 4, seconds=20)
    new = Peer(joined(stack, "2", first), "2", {"every": 1}, other_model)
    report = new.optimizer.catch_up(timeout=30.0)
    stop.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert report is not None
    assert (report.in_step, report.tries) == (True, 1)
    assert max(times[2:]) < 2.0


@pytest.mark.parametrize("wrong", [{"donors": 0}, {"donors": 128}, {"tries": 0}])
def test_what_cannot_be_asked_for(stack: ExitStack, wrong: dict[str, int]) -> None:
    peer = Peer(joined(stack, "0"), "0", {"every": 1}, model)
    with pytest.raises(OptionError, match="wanted 1 to 127"):
        peer.optimizer.catch_up(**wrong)  # type: ignore[arg-type]


def test_a_second_training_does_not_begin_with_the_first_ones_state(stack: ExitStack) -> None:
    first = joined(stack, "0")
    Peer(first, "0", {"every": 1}, model).train(1)
    Peer(first, "0", {"every": 1}, other_model)
    new = Peer(joined(stack, "1", first), "1", {"every": 1}, model)
    assert new.optimizer.catch_up(timeout=20.0) is None
