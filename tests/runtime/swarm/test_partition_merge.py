"""Which of two directories yields, and how they agree on that: on an injected clock."""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections import Counter
from collections.abc import Callable
from itertools import count, pairwise, permutations, product

import pytest

from lossycoll.runtime.swarm.directory import LEASE, Directory
from lossycoll.runtime.swarm.partition_merge import (
    ANSWER_SECONDS,
    ASK_SECONDS,
    BOUND_SECONDS,
    HEARD_SECONDS,
    HOLD_SECONDS,
    MOST_KNOWN,
    MOST_PATIENCE,
    PATIENCE_SECONDS,
    PartitionMerge,
    takes,
    yields,
)
from lossycoll.runtime.swarm.protocol import (
    MOST_PEERS,
    VERSION,
    Averages,
    DirectoryStatus,
    Here,
    Join,
    Joined,
    Refused,
)

SESSION, SCHEMA = "5" * 16, "5c" * 16
STATUS = DirectoryStatus(SESSION, "a" * 32, 0, 3, 100, 7, SCHEMA, "same", "10.0.0.1", 7000, 0)


def place_of(number: int) -> tuple[str, int]:
    return f"10.0.0.{number}", 7000


class Site:
    """A directory, and what it does about others."""

    def __init__(self, clock: Callable[[], float], number: int, session: str = SESSION) -> None:
        self.directory = Directory(clock, session=session)
        self.merge = PartitionMerge(clock, self.directory, name=f"{number:032x}")
        self.own = place_of(number)

    def come(
        self, name: str, number: int = MOST_PEERS, round: int = 0, epoch: int = 0
    ) -> int | None:
        """Returns the peer's number; None: it is refused."""
        incarnation = random.Random(name).randbytes(16).hex()
        wanted = Join(VERSION, name, incarnation, number, self.directory.session, round, epoch)
        answer = self.directory.join(wanted)
        if isinstance(answer, Refused):
            return None
        assert isinstance(answer, Joined)
        self.directory.here(answer.number, Here("127.0.0.1", 4000 + answer.number))
        assert not self.directory.averages(answer.number, Averages(SCHEMA, "")).reason
        return answer.number

    def status(self) -> DirectoryStatus:
        return self.merge.status(self.own)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pair(own: int, other: int) -> tuple[Clock, Site, Site]:
    """Two directories with so many peers each, of different names."""
    clock = Clock()
    sites = Site(clock, 1), Site(clock, 2)
    for site, peers in zip(sites, (own, other), strict=True):
        for peer in range(peers):
            site.come(f"{site.own[0]} {peer}")
    return clock, *sites


def meet(one: Site, other: Site) -> bool:
    """Whether the one, which asks, has yielded to the other."""
    asked = one.status()
    answer = other.merge.asked(asked, other.own)
    return one.merge.answered(asked, answer, other.own)


def test_the_rule_is_an_order_whoever_looks() -> None:
    rivals = [
        dataclasses.replace(STATUS, peers=peers, epoch=epoch, id=name * 32)
        for peers, epoch, name in product((1, 2, 5), (0, 3), "ab")
    ]
    for one, other in permutations(rivals, 2):
        assert yields(one, other) != yields(other, one)
    for one, other, third in permutations(rivals, 3):
        assert not (yields(one, other) and yields(other, third) and yields(third, one))
    assert not yields(STATUS, STATUS)
    ordered = sorted(rivals, key=lambda one: sum(yields(one, other) for other in rivals))
    assert [(one.peers, one.epoch, one.id[0]) for one in ordered] == [
        (peers, epoch, name) for peers, epoch, name in product((5, 2, 1), (0, 3), "ab")
    ]


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({}, True),
        ({"session": "6" * 16}, False),
        ({"id": "a" * 32}, False),
        ({"schema": "77" * 16}, False),
        ({"wire": "int8"}, False),
        ({"schema": ""}, True),
        ({"schema": "", "wire": "int8"}, True),
        ({"peers": 0}, False),
        ({"peers": 4}, False),
        ({"peers": 3}, True),
        ({"free": 0}, True),
    ],
)
def test_whose_peers_are_taken(changes: dict[str, object], may: bool) -> None:
    other = dataclasses.replace(STATUS, **{"id": "b" * 32, "peers": 2, **changes})  # type: ignore[arg-type]
    assert takes(STATUS, other) is may
    assert not takes(dataclasses.replace(STATUS, free=1), other)  # no room for two
    assert not takes(dataclasses.replace(STATUS, peers=0), other)


def test_the_smaller_part_turns_and_the_larger_is_bound() -> None:
    clock, small, large = pair(2, 3)
    assert not meet(large, small)
    assert meet(small, large)
    assert small.merge.to == large.own
    assert all(peer.told for peer in small.directory.peers.values())
    for peer in range(5):
        small.come(f"grows {peer}")
    assert not meet(large, small)  # it has yielded, whatever it has now
    another = Site(clock, 3)
    for peer in range(6):
        another.come(f"another's {peer}")
    assert not meet(large, another)  # it is bound
    clock.now += BOUND_SECONDS + 0.1
    for site in (large, another):
        for number in site.directory.peers:
            site.directory.beat(number)
    assert meet(large, another)


def both_ask(one: Site, other: Site, changes: Callable[[], object]) -> list[bool]:
    """Each asks before it has heard of the other's question. Returns who has yielded."""
    asked = one.status(), other.status()
    changes()
    answers = other.merge.asked(asked[0], other.own), one.merge.asked(asked[1], one.own)
    return [
        one.merge.answered(asked[0], answers[0], other.own),
        other.merge.answered(asked[1], answers[1], one.own),
    ]


def test_two_that_ask_each_other_at_once() -> None:
    assert both_ask(*pair(2, 3)[1:], lambda: None) == [True, False]
    assert both_ask(*pair(3, 2)[1:], lambda: None) == [False, True]
    _, one, other = pair(2, 3)

    def grow() -> None:  # each asks as the smaller one, and answers as the larger
        for peer in range(9):
            one.come(f"grows {peer}")
            other.come(f"grows as well {peer}")

    assert both_ask(one, other, grow) == [False, False]


def test_who_has_not_been_heard_from_counts_nothing() -> None:
    """One that was frozen believes that all its peers are there."""
    clock, frozen, other = pair(5, 2)
    clock.now += HEARD_SECONDS + 0.1
    for number in other.directory.peers:
        other.directory.beat(number)
    assert not meet(other, frozen)
    frozen.directory.beat(0)  # its own peer's
    assert meet(frozen, other)


def test_an_answer_that_the_rule_does_not_bear_out_is_not_followed() -> None:
    _, small, large = pair(2, 3)
    asked = small.status()
    answer = large.merge.asked(asked, large.own)
    for changes in ({"peers": 1}, {"session": "6" * 16}, {"takes": 0}, {"free": 1}):
        claimed = dataclasses.replace(answer, **changes)  # type: ignore[arg-type]
        assert not small.merge.answered(asked, claimed, large.own)
    assert small.merge.answered(asked, answer, large.own)


def test_rounds_go_on_from_the_higher_ones() -> None:
    clock, small, large = pair(2, 3)
    for peer in small.directory.peers.values():
        peer.round = 40
    for peer, number in zip(large.directory.peers.values(), (7, 7, 8), strict=True):
        peer.round = number
    assert meet(small, large)
    rounds = [peer.round for peer in large.directory.peers.values()]
    assert rounds == [39, 39, 40]
    assert large.come("10.0.0.1 0", number=9, round=41) == 9
    assert large.directory.round == 41
    clock.now += BOUND_SECONDS + 0.1
    large.come("a stranger", number=10, round=2**30)
    assert large.directory.round == 41


def test_who_was_told_is_in_no_round_and_may_come_back() -> None:
    clock, small, large = pair(3, 4)
    small.directory.ready(0, 1.0)
    small.directory.ready(1, 1.0)
    assert meet(small, large)
    clock.now += 60.0
    assert small.directory.form() == []
    assert small.directory.lost(0) == []
    wanted = Join(VERSION, "10.0.0.1 0", "7" * 32, 0, SESSION, 0)
    assert small.merge.redirect(wanted) is None
    assert small.merge.redirect(dataclasses.replace(wanted, name="new")) == large.own
    assert small.come("10.0.0.1 0", number=0) == 0
    small.directory.ready(0, 1.0)
    (group,) = small.directory.form()  # by itself: those that were told aren't waited for
    assert [member.number for member in group.members] == [0]
    cells = [peer.cell for peer in small.directory.peers.values()]
    assert cells.count(-1) == 2


def test_a_directory_that_some_come_back_to_is_patient() -> None:
    clock, small, large = pair(3, 4)
    for turn in range(6):
        patience = min(PATIENCE_SECONDS * 2**turn, MOST_PATIENCE)
        for site in (small, large):
            for number in site.directory.peers:
                site.directory.beat(number)
        assert meet(small, large)
        for number, peer in list(small.directory.peers.items()):
            small.directory.lost(number)
            small.come(peer.name, number=number)
        assert not small.merge.ends()
        clock.now += HOLD_SECONDS
        assert small.merge.to is not None
        clock.now += 0.1
        assert not small.merge.ends()
        assert small.merge.to is None
        for seconds, yielded in ((patience - 0.2, False), (0.3, True)):
            clock.now += seconds
            for site in (small, large):
                for number in site.directory.peers:
                    site.directory.beat(number)
            if not yielded:
                assert not meet(small, large)
    assert not meet(large, small)


def test_a_directory_that_all_have_left_stands_by_and_knows_where_they_are() -> None:
    clock, small, large = pair(2, 3)
    assert meet(small, large)
    for number in list(small.directory.peers):
        clock.now += 30.0  # of a long round
        assert not small.merge.ends()
        small.directory.lost(number)
    assert not small.merge.ends()
    clock.now += HOLD_SECONDS
    assert small.merge.ends()
    wanted = Join(VERSION, "new", "7" * 32, MOST_PEERS, "0" * 16, 0)
    assert small.merge.redirect(wanted) == large.own
    clock.now += LEASE + 0.1
    assert small.merge.redirect(wanted) is None
    for number in large.directory.peers:
        large.directory.beat(number)
    small.merge.asked(large.status(), small.own)
    assert small.merge.redirect(wanted) == large.own
    other = dataclasses.replace(wanted, number=3, session="8" * 16)
    assert small.merge.redirect(other) is None  # of another swarm


def test_whom_a_directory_asks_and_when() -> None:
    clock = Clock()
    site = Site(clock, 1)
    for number in range(2, 60):
        site.merge.learn(place_of(number))
    clock.now += 2 * ASK_SECONDS
    assert site.merge.due(site.own) == []  # without peers it looks for nobody
    number = site.come("a")
    assert number is not None
    site.merge.learn(site.own)
    site.directory.serves(number, place_of(59))
    site.directory.spare(number, place_of(58))
    asked = []
    for _ in range(1000):
        clock.now += 0.1
        found = site.merge.due(site.own)
        if found:
            asked.append(clock.now)
            assert found == [place_of(n) for n in range(59 - MOST_KNOWN + 2, 58)]
    clock.now += 2 * ASK_SECONDS
    assert site.merge.due(site.own, [place_of(59), place_of(99)])[-1] == place_of(99)
    gaps = [b - a for a, b in pairwise(asked)]
    assert 0.74 * ASK_SECONDS < min(gaps) < max(gaps) < 1.3 * ASK_SECONDS
    assert len(set(gaps)) > 3
    status = dataclasses.replace(STATUS, host=place_of(59)[0])
    site.merge.asked(status, site.own)  # it has peers, though its own is here
    clock.now += 1.3 * ASK_SECONDS
    assert place_of(59) in site.merge.due(site.own)


# ---- many of them, at random ----


class World:
    """Directories that ask one another over a network that is slow at times, and peers that come,
    go and do as they are told."""

    def __init__(self, seed: int, sites: int, peers: int) -> None:
        self.draw = random.Random(seed)
        self.clock = Clock()
        self.sites = [Site(self.clock, number) for number in range(sites)]
        self.at = {place_of(number): number for number in range(sites)}
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        self.peers: dict[str, tuple[int, int]] = {}
        """Where each is, and by which number."""
        self.yielded = Counter[int]()
        self.busy = True
        for peer in range(peers):
            self.join(f"peer {peer}", self.draw.randrange(sites), MOST_PEERS)
        for site in self.sites:
            for other in self.sites:
                site.merge.learn(other.own)

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.clock.now + seconds, next(self.order), what))

    def join(self, name: str, at: int, number: int) -> None:
        site = self.sites[at]
        wanted = Join(VERSION, name, "7" * 32, number, SESSION, 0)
        place = site.merge.redirect(wanted)
        if place is not None:
            self.after(0.5, lambda: self.join(name, self.at[place], number))
            return
        got = site.come(name, number)
        assert got is not None
        self.peers[name] = at, got

    def turn(self, name: str, to: int) -> None:
        if name in self.peers:
            at, number = self.peers.pop(name)
            self.sites[at].directory.lost(number)
            fails = self.busy and self.draw.random() < 0.1
            self.after(self.draw.random(), lambda: self.join(name, at if fails else to, number))

    def ask(self, one: int, other: int) -> None:
        """Takes up to 1.5 times as long as there is time for."""
        site, there = self.sites[one], self.sites[other]
        asked = site.status()
        scale = 1.5 * ANSWER_SECONDS / 2 if self.busy else 0.01
        out, back = (scale * self.draw.random() for _ in range(2))

        def arrives() -> None:
            answer = there.merge.asked(asked, there.own)
            if out + back <= ANSWER_SECONDS:
                self.after(back, lambda: self.answered(one, asked, answer, there.own))

        self.after(out, arrives)

    def answered(
        self, one: int, asked: DirectoryStatus, answer: DirectoryStatus, place: tuple[str, int]
    ) -> None:
        site = self.sites[one]
        if not site.merge.answered(asked, answer, place):
            return
        self.yielded[one] += 1
        for name, (at, _) in self.peers.items():
            if at == one:
                seconds = self.draw.random() * (40.0 if self.busy else 5.0)
                self.after(seconds, lambda name=name: self.turn(name, self.at[place]))  # type: ignore[misc]

    def split(self) -> None:
        """Some peers can reach but one directory."""
        at = self.draw.randrange(len(self.sites))
        names = [name for name in sorted(self.peers) if self.draw.random() < 0.4]
        for name in names if self.sites[at].merge.to is None else []:
            was, number = self.peers.pop(name)
            self.sites[was].directory.lost(number)
            got = self.sites[at].come(name, number)
            assert got is not None
            self.peers[name] = at, got

    def change(self, turn: int) -> None:
        if self.draw.random() < 0.1:
            self.split()
        elif self.draw.random() < 0.5 and len(self.peers) > 3:
            name = self.draw.choice(sorted(self.peers))
            at, number = self.peers.pop(name)
            self.sites[at].directory.lost(number)
        else:
            self.join(f"newcomer {turn}", self.draw.randrange(len(self.sites)), MOST_PEERS)

    def go(self, seconds: float) -> None:
        for turn in range(int(seconds / 0.1)):
            self.clock.now += 0.1
            for at, number in self.peers.values():
                self.sites[at].directory.beat(number)
            if self.busy and self.draw.random() < 0.05:
                self.change(turn)
            for number, site in enumerate(self.sites):
                for place in site.merge.due(site.own):
                    self.ask(number, self.at[place])
                if site.merge.ends():
                    site.directory.adopt(SESSION)
            while self.events and self.events[0][0] <= self.clock.now:
                heapq.heappop(self.events)[2]()
                self.check()

    def check(self) -> None:
        """Whoever follows those that have yielded comes to one that hasn't."""
        to = {site.own: site.merge.to for site in self.sites}
        for site in self.sites:
            way = [site.own]
            while (following := to[way[-1]]) is not None:
                assert following not in way, "they yield in a circle"
                way.append(following)


@pytest.mark.parametrize("sites", [2, 3, 5])
def test_never_do_two_yield_to_each_other(sites: int) -> None:
    """Whatever the order of messages, and whoever comes and goes meanwhile. In the end all are in
    one place."""
    yielded = 0
    for seed in range(8):
        world = World(seed, sites, 4 * sites)
        world.go(150.0)
        world.busy = False
        world.go(MOST_PATIENCE)
        assert len({at for at, _ in world.peers.values()}) == 1
        assert sum(bool(site.directory.peers) for site in world.sites) == 1
        yielded += sum(world.yielded.values())
    assert yielded > 12 * (sites - 1)
