"""Which of two directories yields, and how they agree on that: on an injected clock."""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections.abc import Callable
from functools import partial
from itertools import count, pairwise, permutations, product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

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
    Serves,
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
        small.directory._rounds.move(peer, 40)
    for peer, number in zip(large.directory.peers.values(), (7, 7, 8), strict=True):
        large.directory._rounds.move(peer, number)
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
    site.directory.serves(number, Serves(*place_of(59)))
    other = site.come("b")
    assert other is not None
    site.directory.serves(other, Serves(*place_of(58), spare=1))
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


# ---- many of them, in any order ----


class Directories(RuleBasedStateMachine):
    """Directories whose messages pass in any order or come too late, and peers that come, go and
    do as they are told.

    Never do two yield to each other; in the end all peers are at one.
    """

    sites: list[Site]

    @initialize(sites=st.sampled_from([2, 3, 5]), draw=st.randoms(use_true_random=True))
    def begin(self, sites: int, draw: random.Random) -> None:
        self.draw = draw
        """When peers turn, and which turns fail."""
        self.clock = Clock()
        self.sites = [Site(self.clock, number) for number in range(sites)]
        self.at = {place_of(number): number for number in range(sites)}
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        self.peers: dict[str, tuple[int, int]] = {}
        """Where each is, and by which number."""
        self.on_way: list[tuple[float, Callable[[], None]]] = []
        """Messages, and when each is too late."""
        self.busy = True
        for peer in range(2 * sites):
            self._join(f"peer {peer}", peer % sites, MOST_PEERS)
        for site in self.sites:
            for other in self.sites:
                site.merge.learn(other.own)

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.0, 10.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self._go(seconds)

    @rule(at=st.integers(0, 4))
    def ask(self, at: int) -> None:
        site = self.sites[at % len(self.sites)]
        site.merge._asks_at = self.clock.now
        self._ask_those_due(at % len(self.sites))

    @precondition(lambda self: self.on_way)
    @rule(which=st.integers(0, 7))
    def arrive(self, which: int) -> None:
        self._arrive(which % len(self.on_way))

    @rule(at=st.integers(0, 4))
    def come(self, at: int) -> None:
        self._join(f"newcomer {next(self.order)}", at % len(self.sites), MOST_PEERS)

    @precondition(lambda self: len(self.peers) > 3)
    @rule(which=st.integers(0, 30))
    def go(self, which: int) -> None:
        self._leave(sorted(self.peers)[which % len(self.peers)])

    @rule(at=st.integers(0, 4), chosen=st.integers(0, 2**12))
    def split(self, at: int, chosen: int) -> None:
        """Some peers can reach but one directory."""
        at %= len(self.sites)
        if self.sites[at].merge.to is not None:
            return
        for name in [name for n, name in enumerate(sorted(self.peers)) if chosen >> n & 1]:
            number = self._leave(name)
            got = self.sites[at].come(name, number)
            assert got is not None
            self.peers[name] = at, got

    def teardown(self) -> None:
        if not hasattr(self, "sites"):
            return
        self.busy = False
        self._go(MOST_PATIENCE)
        assert len({at for at, _ in self.peers.values()}) == 1
        assert sum(bool(site.directory.peers) for site in self.sites) == 1

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.clock.now + seconds, next(self.order), what))

    def _join(self, name: str, at: int, number: int) -> None:
        site = self.sites[at]
        wanted = Join(VERSION, name, "7" * 32, number, SESSION, 0)
        place = site.merge.redirect(wanted)
        if place is not None:
            self._after(0.5, lambda: self._join(name, self.at[place], number))
            return
        got = site.come(name, number)
        assert got is not None
        self.peers[name] = at, got

    def _leave(self, name: str) -> int:
        at, number = self.peers.pop(name)
        self.sites[at].directory.lost(number)
        return number

    def _turn(self, name: str, to: int) -> None:
        if name in self.peers:
            at = self.peers[name][0]
            number = self._leave(name)
            fails = self.busy and self.draw.random() < 0.1
            self._after(self.draw.random(), lambda: self._join(name, at if fails else to, number))

    def _ask_those_due(self, number: int) -> None:
        site = self.sites[number]
        for place in site.merge.due(site.own):
            asked, late = site.status(), self.clock.now + ANSWER_SECONDS
            self.on_way.append((late, partial(self._asked, number, asked, place, late)))

    def _asked(self, one: int, asked: DirectoryStatus, place: tuple[str, int], late: float) -> None:
        there = self.sites[self.at[place]]
        answer = there.merge.asked(asked, there.own)
        self.on_way.append((late, partial(self._answered, one, asked, answer, place)))

    def _arrive(self, which: int) -> None:
        late, message = self.on_way.pop(which)
        if self.clock.now <= late:
            message()
            self._check()

    def _answered(
        self, one: int, asked: DirectoryStatus, answer: DirectoryStatus, place: tuple[str, int]
    ) -> None:
        if not self.sites[one].merge.answered(asked, answer, place):
            return
        for name, (at, _) in self.peers.items():
            if at == one:
                seconds = self.draw.random() * (40.0 if self.busy else 5.0)
                self._after(seconds, partial(self._turn, name, self.at[place]))

    def _go(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.1)):
            self.clock.now += 0.1
            for at, number in self.peers.values():
                self.sites[at].directory.beat(number)
            for number, site in enumerate(self.sites):
                self._ask_those_due(number)
                if site.merge.ends():
                    site.directory.adopt(SESSION)
            while self.on_way and not self.busy:
                self._arrive(0)
            self.on_way = [one for one in self.on_way if self.clock.now <= one[0]]
            while self.events and self.events[0][0] <= self.clock.now:
                heapq.heappop(self.events)[2]()
                self._check()

    def _check(self) -> None:
        """Whoever follows those that have yielded comes to one that hasn't."""
        to = {site.own: site.merge.to for site in self.sites}
        for site in self.sites:
            way = [site.own]
            while (following := to[way[-1]]) is not None:
                assert following not in way, "they yield in a circle"
                way.append(following)


TestDirectories = Directories.TestCase
TestDirectories.settings = settings(max_examples=40, stateful_step_count=30)
