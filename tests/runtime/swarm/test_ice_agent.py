"""Peers that look for routes to each other, behind translators, in virtual time."""

from __future__ import annotations

import heapq
import random
from dataclasses import replace
from itertools import count

import pytest

from lossycoll.runtime.swarm.ice_agent import (
    MOST_PEER_REFLEXIVE,
    NOTHING,
    QUIET,
    ConnectivityMessage,
    IceAgent,
    Kind,
    Route,
    Sends,
    key_of,
    pack,
    short,
    unpack,
)
from lossycoll.runtime.swarm.protocol import Member
from tests.support.nat import Address, Nat

DIRECTORY = ("198.51.100.1", 7000)
INTERVAL = 15.0
KEY = key_of(None, "5" * 16)


def incarnation_of(number: int, start: int = 0) -> str:
    return random.Random(f"{number}/{start}").randbytes(16).hex()


class World:
    """Peers, each behind a translator or none, and checks on their way for 20 ms."""

    def __init__(self, loss: float = 0.0, seed: int = 1) -> None:
        self.now = 0.0
        self.loss = loss
        self.random = random.Random(seed)
        self.order = count()
        self.flying: list[tuple[float, int, Address, Address, bytes]] = []
        self.meetings: dict[int, IceAgent] = {}
        self.places: dict[int, Address] = {}
        self.nats: dict[int, Nat | None] = {}
        self.members: dict[int, Member] = {}
        self.passed: list[tuple[Address, Address, ConnectivityMessage]] = []

    def come(
        self, number: int, nat: Nat | None, local: Address = ("192.168.0.2", 5000)
    ) -> IceAgent:
        """All that are behind translators may have the same address of their own."""
        if nat is None:
            local = (f"198.51.100.{10 + number}", 5000)
        seen = local if nat is None else nat.out(local, DIRECTORY)
        draw = random.Random(number)
        made = IceAgent(number, lambda: self.now, INTERVAL, draw.randbytes)
        others = () if seen == local else (seen,)
        self.members[number] = Member(number, *local, incarnation_of(number), 1.0, others=others)
        self.meetings[number], self.places[number], self.nats[number] = made, local, nat
        return made

    def nat(self, number: int, **how: object) -> Nat:
        return Nat(f"203.0.113.{number}", lambda: self.now, **how)  # type: ignore[arg-type]

    def send(self, number: int, sends: Sends) -> None:
        for to, message in sends:
            nat, source = self.nats[number], self.places[number]
            if nat is not None:
                source = nat.out(source, to)
            if self.random.random() >= self.loss:
                entry = (self.now + 0.02, next(self.order), source, to, pack(message, KEY))
                heapq.heappush(self.flying, entry)

    def _arrive(self, source: Address, to: Address, data: bytes) -> None:
        self.passed.append((source, to, unpack(data, KEY)))
        for number, nat in self.nats.items():
            inner = to if nat is None else None
            if nat is not None and to[0] == nat.address:
                inner = nat.into(to[1], source)
            if inner == self.places[number]:
                self.send(number, self.meetings[number].heard(unpack(data, KEY), source))

    def begin(self, one: int, other: int) -> None:
        for here, there in ((one, other), (other, one)):
            member, own = self.members[there], self.members[here].incarnation
            self.send(here, self.meetings[here].begin(member, own))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            times = [one.wakes() for one in self.meetings.values()]
            times += [self.flying[0][0] if self.flying else None, end]
            self.now = max(self.now, min(time for time in times if time is not None))
            if self.now >= end:
                return
            while self.flying and self.flying[0][0] <= self.now:
                _, _, source, to, data = heapq.heappop(self.flying)
                self._arrive(source, to, data)
            for number, one in self.meetings.items():
                self.send(number, one.due())

    def route(self, here: int, there: int) -> Route | None:
        return self.meetings[here].route(self.members[there], self.members[here].incarnation)

    def meet(self, one: int, other: int, seconds: float = 2.5) -> bool:
        """Whether both have a route, and the same, by which packets come from where it leads."""
        self.begin(one, other)
        self.run(seconds)
        for number in (one, other):
            self.meetings[number].give_up(self.members[other + one - number].incarnation)
        there, back = self.route(one, other), self.route(other, one)
        if there is None or back is None:
            assert there is None
            assert back is None
            return False
        assert there.salt == back.salt
        for here, route, opposite in ((one, there, back), (other, back, there)):
            nat = self.nats[here]
            assert opposite.place == (
                self.places[here] if nat is None else nat.out(self.places[here], route.place)
            )
        return True


@pytest.mark.parametrize("kinds", [("none", "none"), ("none", "cone"), ("cone", "cone")])
@pytest.mark.parametrize("turned", [False, True])
def test_peers_behind_cones_meet(kinds: tuple[str, str], turned: bool) -> None:
    world = World()
    for number, kind in enumerate(kinds[::-1] if turned else kinds):
        world.come(number, None if kind == "none" else world.nat(number))
    assert world.meet(0, 1)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("other", "meets"), [("none", True), ("open", True), ("cone", False)])
def test_a_symmetric_one_meets_whoever_lets_strangers_in(
    other: str, meets: bool, turned: bool
) -> None:
    """It comes from a port that nobody can know before."""
    world = World()
    nats = [world.nat(0, symmetric=True), None if other == "none" else world.nat(1)]
    if nats[1] is not None:
        nats[1].open = other == "open"
    for number, nat in enumerate(nats[::-1] if turned else nats):
        world.come(number, nat)
    assert world.meet(0, 1) is meets
    if not meets:
        assert sum(nat.filtered for nat in nats if nat is not None) > 5


def test_two_symmetric_ones_do_not_meet() -> None:
    world = World()
    for number in (0, 1):
        world.come(number, world.nat(number, symmetric=True))
    assert not world.meet(0, 1)
    assert world.meetings[0].wakes() is None  # nothing is left of the try


def test_peers_of_one_network_take_the_way_within() -> None:
    world = World()
    nat = world.nat(0)
    world.come(0, nat, ("192.168.0.2", 5000))
    world.come(1, nat, ("192.168.0.3", 5000))
    for number in (0, 1):  # what goes to the other's own address isn't translated
        world.nats[number] = None
    world.begin(0, 1)
    world.run(1.0)
    route = world.route(0, 1)
    assert route is not None
    assert route.place == ("192.168.0.3", 5000)


@pytest.mark.parametrize("seed", range(30))
def test_lost_checks_cost_time(seed: int) -> None:
    world = World(loss=0.4, seed=seed)
    world.come(0, world.nat(0))
    world.come(1, world.nat(1))
    world.begin(0, 1)
    world.run(20.0)
    there, back = world.route(0, 1), world.route(1, 0)
    assert there is not None
    assert back is not None
    assert there.salt == back.salt


def test_who_begins_later_is_waited_for() -> None:
    world = World()
    for number in (0, 1):
        world.come(number, world.nat(number))
    world.send(0, world.meetings[0].begin(world.members[1], world.members[0].incarnation))
    world.run(1.0)
    assert world.route(0, 1) is None
    assert world.meet(0, 1)


def test_a_way_is_kept_and_taken_once() -> None:
    world = World()
    for number in (0, 1):
        world.come(number, None)
    assert world.meet(0, 1)
    before = world.route(0, 1)
    assert world.meet(0, 1, 0.0)
    assert world.route(0, 1) is before
    world.members[1] = replace(world.members[1], incarnation=incarnation_of(1, 1))
    assert world.route(0, 1) is None
    assert world.meet(0, 1)
    after = world.route(0, 1)
    assert before is not None
    assert after is not None
    assert after.salt != before.salt


def test_signs_of_life_keep_mappings() -> None:
    kept, gone = World(), World()
    for world in (kept, gone):
        for number in (0, 1):
            world.come(number, world.nat(number, life=2 * INTERVAL))
        assert world.meet(0, 1)
        for _ in range(6):
            if world is kept:
                for number, one in world.meetings.items():
                    world.send(number, one.keepalives())
            world.run(INTERVAL)
    assert kept.route(0, 1) is not None
    assert [nat.expired for nat in kept.nats.values() if nat] == [0, 0]
    assert gone.route(0, 1) is None  # nobody was heard for longer than QUIET intervals
    assert gone.now > QUIET * INTERVAL
    for nat in gone.nats.values():
        assert nat is not None
        nat.out(("192.168.0.2", 5000), DIRECTORY)
        assert nat.expired == 1


def test_one_that_has_lost_the_way_finds_another_in_two_tries() -> None:
    """The other still trusts its own, until it hears so by an answer that nobody can repeat."""
    world = World()
    for number in (0, 1):
        world.come(number, world.nat(number))
    assert world.meet(0, 1)
    world.meetings[1].forget(0)
    world.begin(0, 1)
    world.run(2.5)
    world.meetings[1].give_up(world.members[0].incarnation)
    assert world.route(1, 0) is None
    assert world.route(0, 1) is None
    assert world.meet(0, 1)


def test_what_was_said_once_is_not_believed_again() -> None:
    """Somebody repeats all that passed, from another place, to whoever it was for."""
    world = World()
    for number in (0, 1):
        world.come(number, None)
    assert world.meet(0, 1)
    routes = world.route(0, 1), world.route(1, 0)
    assert {message.kind for _, _, message in world.passed} >= set(Kind) - {Kind.KEEPALIVE}
    for _, _, message in list(world.passed):
        for source in (("198.51.100.66", 66), world.places[message.sender]):
            world.send(message.receiver, world.meetings[message.receiver].heard(message, source))
    world.run(2.0)
    assert (world.route(0, 1), world.route(1, 0)) == routes
    assert [route.doubted for route in routes if route is not None] == [False, False]
    assert all(one.counts["stale"] > 0 for one in world.meetings.values())
    # Nor in a later try, of other nonces.
    repeated = [message for _, _, message in world.passed]
    for number in (0, 1):
        world.meetings[number].forget(1 - number)
    world.send(0, world.meetings[0].begin(world.members[1], world.members[0].incarnation))
    for message in repeated:
        for source in (("198.51.100.66", 66), world.places[1]):
            if message.receiver == 0:
                sends = world.meetings[0].heard(message, source)
                assert Kind.NOMINATE not in {said.kind for _, said in sends}
    assert world.route(0, 1) is None
    assert world.meet(0, 1)
    route = world.route(0, 1)
    assert route is not None
    assert route.place == world.places[1]


def test_an_old_check_undoes_no_route() -> None:
    """One of an earlier try. Whoever repeats it doesn't answer what only its sender could."""
    world = World()
    for number in (0, 1):
        world.come(number, None)
    assert world.meet(0, 1)
    old = next(message for _, _, message in world.passed if message.sender == 1)
    for number in (0, 1):
        world.meetings[number].forget(1 - number)
    assert world.meet(0, 1)
    sends = world.meetings[0].heard(old, world.places[1])
    assert [said.kind for _, said in sends] == [Kind.ANSWER, Kind.CHECK]
    assert len(world.meetings[0].heard(old, world.places[1])) == 1  # not so soon again
    world.send(0, sends)
    world.run(2.0)
    assert world.route(0, 1) is not None


def test_checks_of_many_places_are_not_all_tried() -> None:
    world = World()
    one = world.come(0, None)
    world.come(1, None)
    one.begin(world.members[1], world.members[0].incarnation)
    asks = ConnectivityMessage(
        Kind.CHECK, 1, 0, short(world.members[1].incarnation), bytes(range(16))
    )
    for port in range(1, 100):
        sends = one.heard(asks, ("198.51.100.66", port))
        assert sends[0][1].kind == Kind.ANSWER
        assert len(sends) <= 2
    world.now += 1.0
    assert len(one.due()) == 1 + MOST_PEER_REFLEXIVE


@pytest.mark.parametrize("kind", Kind)
def test_checks_of_others_change_nothing(kind: Kind) -> None:
    """By number, by incarnation, or at all."""
    world = World()
    one = world.come(0, None)
    world.come(1, None)
    assert world.meet(0, 1)
    before = one.route(world.members[1], world.members[0].incarnation)
    nonce = bytes(range(16))
    for sender in (0, 1, 2, 127):
        for receiver in (0, 1):
            message = ConnectivityMessage(
                kind, sender, receiver, short(incarnation_of(9)), nonce, nonce, ("1.2.3.4", 5)
            )
            sends = one.heard(message, ("198.51.100.66", 66))
            assert [said.kind for _, said in sends] in ([], [Kind.ANSWER])
            assert all(said.nonce == NOTHING for _, said in sends)
    assert one.route(world.members[1], world.members[0].incarnation) is before
    assert one.wakes() is None
    assert one.counts["foreign"] + one.counts["stale"] > 0
