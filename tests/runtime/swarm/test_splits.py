"""Swarms in two parts that become one again, and directories that are elected: real sockets,
engines and processes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lossycoll.errors import LossyError, OperationTimeout, RendezvousError
from lossycoll.runtime.control.descriptors import listener
from lossycoll.runtime.control.events import Received
from lossycoll.runtime.control.transport import Transport
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.swarm import directory_tables
from lossycoll.runtime.swarm.directory_list import peers_of
from lossycoll.runtime.swarm.directory_transport import ZmqDirectoryTransport, swarm_keys
from lossycoll.runtime.swarm.member import RoundReport, SwarmMember
from lossycoll.runtime.swarm.partition_merge import PartitionMerge
from lossycoll.runtime.swarm.protocol import DirectoryStatus, pack
from lossycoll.runtime.swarm.server import DirectoryServer
from lossycoll.runtime.swarm.swarm import Swarm
from tests.runtime.swarm.test_member import SCHEMA, peers, together
from tests.support import halves
from tests.support.halves import cut, divide, heal, names, place
from tests.support.split_peer import SECRET as TEXT
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[3]
SECRET = Secret.of(b"a secret of tests")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    halves.hurry(monkeypatch)


def mean(members: Sequence[SwarmMember], own: Sequence[float]) -> list[RoundReport]:
    """A round of these, whose values are random around their own; all must have its exact mean."""
    generator = np.random.default_rng(5)
    values = [generator.normal(one, 1.0, 3000).astype(np.float32) for one in own]
    wanted = np.mean(values, axis=0)
    reports = together(members, values)
    assert [one.failure for one in reports] == [""] * len(members)
    for one in values:
        np.testing.assert_allclose(one, wanted, rtol=0, atol=1e-5)
    return reports


class Parts:
    """Peers a, b and x with one directory, c and d with another, of one session."""

    def __init__(
        self, stack: ExitStack, secret: Secret | None = SECRET, patience: float = 20.0
    ) -> None:
        self.one = halves.directory(stack, secret, "", patience)
        self.old = peers(stack, place(self.one), "abcd", secret)
        mean(self.old, [0.0, 1.0, 2.0, 3.0])
        self.two = halves.directory(stack, secret, self.old[0].session, patience)
        divide(self.old[2:], self.two)
        until(lambda: names(self.one) == {"a", "b"})
        (self.new,) = peers(stack, place(self.one), "x", secret)
        self.first = [*self.old[:2], self.new]
        self.second = self.old[2:]

    def are_one(self, also: str = "") -> None:
        """Returns when all are with the one directory, and it knows what they average."""
        until(lambda: names(self.one) == set("abcdx" + also), seconds=30)
        for member in self.all:
            member.client.names()

    @property
    def all(self) -> list[SwarmMember]:
        return [*self.first, *self.second]


@pytest.mark.parametrize("knows", ["one", "two"])
@pytest.mark.parametrize("secret", [None, SECRET], ids=["clear", "sealed"])
def test_halves_become_one(
    knows: str, secret: Secret | None, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever knows of the other. A number that was given away meanwhile is another's."""
    monkeypatch.setattr(directory_tables, "KEPT_SECONDS", 0.0)
    parts = Parts(stack, secret)
    assert parts.new.number == parts.second[0].number == 2
    rounds = [mean(parts.second, [2.0, 3.0])[0].round for _ in range(5)]
    first = [mean(parts.first, [0.0, 1.0, 5.0])[0].round for _ in range(2)]
    assert max(first) < max(rounds)
    heal(*((parts.one, parts.two) if knows == "one" else (parts.two, parts.one)))
    parts.are_one()
    until(lambda: len({one.number for one in parts.all}) == 5)
    assert parts.new.number == 2
    reports = mean(parts.all, [0.0, 1.0, 5.0, 2.0, 3.0])
    assert {frozenset(one.members) for one in reports} == {frozenset(o.number for o in parts.all)}
    assert min(one.round for one in reports) > max(rounds)
    for _ in range(3):
        mean(parts.all, [4.0, 1.0, 5.0, 2.0, 3.0])
    until(lambda: parts.two._merge.to is None)
    found = peers_of(place(parts.two), secret)  # who looks from outside is, too
    assert found is not None
    assert (found[0], sorted(found[1])) == (place(parts.one), [*"abcdx"])
    late = SwarmMember([place(parts.two)], name="late", secret=secret)
    stack.callback(late.close)  # it has been sent on
    assert set(late.client.names()) == {*"abcdx", "late"}


def test_one_port_is_enough_for_another_number(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_tables, "KEPT_SECONDS", 0.0)
    one, two = halves.directory(stack, None), None
    old = peers(stack, place(one), "ab", None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    old += peers(stack, place(one), "c", None, port_range=f"{port}-{port}")
    two = halves.directory(stack, None, one._directory.session)
    divide(old[2:], two)
    until(lambda: names(one) == set("ab"))
    old[2:2] = peers(stack, place(one), "x", None)
    assert old[2].number == old[3].number == 2
    heal(two, one)
    until(lambda: names(one) == set("abcx"), seconds=20)
    until(lambda: old[3].number == 3)
    for member in old:
        member.client.names()
    mean(old, [1.0, 2.0, 3.0, 7.0])


def test_a_redirected_peer_asks_for_its_reflexive_address(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its old number, or by another one. What the former engine hears is of no matter then."""
    monkeypatch.setattr(directory_tables, "KEPT_SECONDS", 0.0)
    parts, seen = Parts(stack), ("203.0.113.9", 4711)
    observer, former = parts.one.reflexive, parts.second[0]._endpoint
    answer = observer._answer
    monkeypatch.setattr(observer, "_answer", lambda data, source: answer(data, seen))
    heal(parts.two, parts.one)
    parts.are_one()
    until(lambda: parts.second[0].number != 2)
    numbers = [one.number for one in parts.second]

    def others() -> list[Any]:
        known = parts.one._directory.peers
        places = [known[number].place for number in numbers if number in known]
        return [place.others if place else () for place in places]

    until(lambda: others() == [(seen,), (seen,)])
    parts.second[0].say_address(former.place, ("203.0.113.9", 1), True)
    mean(parts.all, [0.0, 1.0, 5.0, 2.0, 3.0])
    assert others() == [(seen,), (seen,)]


def test_a_round_that_is_on_ends_before_its_peers_turn(stack: ExitStack) -> None:
    parts = Parts(stack)
    entered, leave = threading.Event(), threading.Event()
    slow = parts.second[1]
    exchange = slow._exchange

    def wait(*rest: Any) -> Any:
        entered.set()
        leave.wait(30)
        return exchange(*rest)

    slow._exchange = wait  # type: ignore[method-assign]
    ended: list[RoundReport] = []
    thread = threading.Thread(target=lambda: ended.extend(mean(parts.second, [2.0, 3.0])))
    thread.start()
    assert entered.wait(10)
    heal(parts.two, parts.one)
    until(lambda: parts.two._merge.to == place(parts.one))
    time.sleep(0.5)
    assert not names(parts.one) & {"c", "d"}
    assert thread.is_alive()
    leave.set()
    thread.join(20)
    slow._exchange = exchange  # type: ignore[method-assign]
    assert [one.missing for one in ended] == [(), ()]
    assert {one.contributions for one in ended} == {2.0}
    parts.are_one()
    mean(parts.all, [0.0, 1.0, 5.0, 2.0, 3.0])


def test_who_cannot_turn_comes_back(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directories reach each other, and peers of the one can't reach the other."""
    parts = Parts(stack)
    reach, refused = ZmqDirectoryTransport.reach, []

    def some(self: ZmqDirectoryTransport, where: tuple[str, int], session: str) -> Any:
        if where == place(parts.one):
            refused.append(where)
            raise TimeoutError("unreachable")
        return reach(self, where, session)

    monkeypatch.setattr(ZmqDirectoryTransport, "reach", some)
    heal(parts.two, parts.one)
    until(lambda: len(refused) >= 2)
    until(lambda: names(parts.two) == {"c", "d"})
    mean(parts.second, [2.0, 3.0])
    until(lambda: parts.two._merge.to is None)
    mean(parts.first, [0.0, 1.0, 5.0])
    time.sleep(5 * halves.ASK_SECONDS)
    assert parts.two._merge.to is None  # it's patient
    monkeypatch.setattr(ZmqDirectoryTransport, "reach", reach)
    parts.two._merge._bound_until = 0.0
    parts.are_one()
    mean(parts.all, [0.0, 1.0, 5.0, 2.0, 3.0])


def test_who_is_refused_there_comes_back(stack: ExitStack) -> None:
    """A newcomer of the other part has its name."""
    parts = Parts(stack)
    peers(stack, place(parts.one), "d", SECRET)
    heal(parts.two, parts.one)
    until(lambda: "c" in names(parts.one))
    until(lambda: names(parts.two) == {"d"})
    mean(parts.second[1:], [3.0])
    assert len(parts.one._directory.peers) == 5


@pytest.mark.parametrize("differs", [("schema", "77" * 16), ("wire", "int8")], ids=str)
def test_other_models_do_not_meet(differs: tuple[str, str], stack: ExitStack) -> None:
    parts = Parts(stack)
    for peer in list(parts.two._directory.peers.values()):
        assert peer.said is not None
        peer.said = dataclasses.replace(peer.said, **dict([differs]))  # type: ignore[arg-type]
    heal(parts.two, parts.one)
    time.sleep(5 * halves.ASK_SECONDS)
    assert names(parts.two) == {"c", "d"}


@pytest.mark.long
def test_flapping_splits(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers lose the directory and find it again, sooner than one may yield twice. Rounds go on,
    and it ends as one."""
    halves.hurry(monkeypatch, patience=1.0)
    parts = Parts(stack, patience=1.0)
    yielded: list[bool] = []
    answered = PartitionMerge.answered
    monkeypatch.setattr(
        PartitionMerge, "answered", lambda *rest: yielded.append(answered(*rest)) or yielded[-1]
    )
    stop, wrong = threading.Event(), []
    rounds: list[list[RoundReport]] = [[] for _ in parts.all]
    values = [np.full(500, float(peer), np.float32) for peer in range(5)]

    def work(i: int, member: SwarmMember) -> None:
        try:
            while not stop.is_set():
                rounds[i].append(member.average(values[i], 1.0, 30.0))
                time.sleep(0.01)
        except LossyError as error:
            if not stop.is_set():
                wrong.append(error)

    def is_one() -> bool:
        return len(names(parts.one)) == 5 or len(names(parts.two)) == 5

    threads = [
        threading.Thread(target=work, args=(i, member)) for i, member in enumerate(parts.all)
    ]
    for thread in threads:
        thread.start()
    until(lambda: all(len(one) > 10 for one in rounds), seconds=40)
    draw = random.Random(4)
    for _ in range(10):
        cut(parts.one, parts.two)
        fewer = min((parts.one, parts.two), key=lambda one: len(names(one)))
        divide(draw.sample(parts.all, 2), fewer, waits=False)
        time.sleep(draw.choice([0.2, 1.0]))
        heal(parts.two, parts.one)
        heal(parts.one, parts.two)
        time.sleep(draw.choice([0.2, 1.0, 3.0]))
    until(is_one, seconds=40)
    before = [len(one) for one in rounds]
    until(lambda: all(len(one) > n + 5 for one, n in zip(rounds, before, strict=True)), seconds=40)
    stop.set()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive()
    assert not wrong
    assert sum(yielded) >= 3
    for told in rounds:
        # Who comes back to a directory that doesn't expect it takes the numbers that are there, or
        # strangers could move them: so they go back at most as often as the network was cut.
        numbers = [one.round for one in told]
        assert sum(after <= before for before, after in itertools.pairwise(numbers)) <= 10
    assert max(float(one.max()) for one in values) - min(float(one.min()) for one in values) < 1e-3
    assert 0.0 <= values[0].min() <= values[0].max() <= 4.0


@pytest.mark.parametrize("secret", [b"another secret, of others", None], ids=["other", "none"])
def test_a_stranger_that_claims_to_be_a_directory(secret: bytes | None, stack: ExitStack) -> None:
    """It sits where a directory was, and asks by itself as well."""
    parts = Parts(stack)
    other = None if secret is None else Secret.of(secret)
    stranger = Transport(swarm_keys(other))
    stack.callback(stranger.close)
    listens = listener("127.0.0.1", (0, 0), 64)
    where = listens.getsockname()[:2]
    stranger.listen(listens)
    session = parts.old[0].session
    claims = DirectoryStatus(
        session, "a" * 32, 0, 128, 128, 0, SCHEMA, "same", where[0], where[1], 1
    )
    for server in (parts.one, parts.two):
        server._merge.learn(where)
    asked, heard = 0, []
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        asks = stranger.connect(place(parts.one))
        stranger.send(asks, pack(claims))
        asked += 1
        found = stranger.poll(0.05)
        heard += [one for one in found if isinstance(one, Received)]
        stranger.drop(asks)
    assert asked > 5
    assert stranger.counts["handshake"] > 5  # they have asked it
    assert heard == []
    assert parts.one._merge.to is None
    assert parts.two._merge.to is None
    mean(parts.first, [0.0, 1.0, 5.0])
    mean(parts.second, [2.0, 3.0])
    heal(parts.two, parts.one)
    parts.are_one()


def test_places_that_are_silent_hold_nobody_up(stack: ExitStack) -> None:
    parts = Parts(stack)
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    for server in (parts.one, parts.two):
        server._merge.learn(silent.getsockname()[:2])
        server._merge.learn(("127.0.0.1", 1))
        server._merge.learn(("::1", 1))
    until(lambda: len(parts.one._probe._queries) >= 1)
    mean(parts.second, [2.0, 3.0])
    heal(parts.two, parts.one)
    parts.are_one()
    until(lambda: len(parts.one._probe._queries) <= 3)


# ---- all directories have gone ----


class Process:
    """A peer; with ``listen`` it has a directory."""

    def __init__(self, stack: ExitStack, **config: Any) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.split_peer", json.dumps(config)],
            cwd=ROOT,
            stdin=pipe,
            stdout=pipe,
            text=True,
        )
        stack.callback(self.end)
        assert self.process.stdout is not None
        self.address = json.loads(self.process.stdout.readline())["address"]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=20)


def has_all(swarms: Sequence[Swarm]) -> tuple[DirectoryServer, Swarm]:
    """The directory that all of them are with, once they are, and whose it is."""
    every = {one.name for one in swarms}
    found: list[tuple[DirectoryServer, Swarm]] = []

    def is_one() -> bool:
        serve = [(one._server, one) for one in swarms if one._server is not None]
        found[:] = [pair for pair in serve if names(pair[0]) == every]
        return len(found) == 1

    until(is_one, seconds=40)
    return found[0]


def test_those_that_are_left_elect_others(stack: ExitStack) -> None:
    """Both that listen are killed at once; then the one that was elected, and the next."""
    first = Process(stack, name="first", own=0.0, listen="127.0.0.1:0")
    second = Process(stack, name="second", own=0.0, listen="127.0.0.1:0", join=[first.address])
    swarms = [Swarm(join=[first.address], secret=TEXT, name=name) for name in "abcde"]
    for swarm in swarms:
        stack.callback(swarm.close)
        swarm.member.averages(SCHEMA)
    swarms[-1].wait_for(7, 20.0)
    until(lambda: all(len(one.member.client.directories.places) == 7 for one in swarms))
    for process in (first, second):
        os.kill(process.process.pid, signal.SIGKILL)
    for count in (5, 4, 3, 2):
        # Any will do: beside load two open, and the one of more peers is left.
        server, elected = has_all(swarms)
        reports = mean([one.member for one in swarms], list(range(count)))
        assert {len(one.members) for one in reports} == {count}
        assert elected.address
        until(lambda server=server: server.reflexive.counts["answered"] > 0)  # type: ignore[misc]
        swarms.remove(elected)
        elected.close()
    heard = [f"{host}:{port}" for host, port in swarms[0].member.client.directories.heard]
    newcomer = Swarm(join=heard, secret=TEXT, name="z")
    stack.callback(newcomer.close)
    newcomer.wait_for(2, 20.0)


def test_those_that_listened_find_the_swarm_when_they_come_back(stack: ExitStack) -> None:
    """Where it is now nobody was told; but it looks for them."""
    first = Swarm("127.0.0.1:0", secret=TEXT, name="first")
    stack.callback(first.close)
    second = Swarm("0.0.0.0:0", [first.address], secret=TEXT, name="second")
    stack.callback(second.close)
    swarms = [Swarm(join=[first.address], secret=TEXT, name=name) for name in "ab"]
    for swarm in swarms:
        stack.callback(swarm.close)
        swarm.member.averages(SCHEMA)
    until(lambda: all(len(one.member.client.directories.places) == 4 for one in swarms))
    places = [first.address, second.address]
    second.close()
    first.close()
    mean([one.member for one in swarms], [1.0, 2.0])
    again = Swarm(places[0], [places[1]], secret=TEXT, name="first, again")
    stack.callback(again.close)
    until(lambda: len(again.peers()) == 3)
    host, _, port = places[1].rpartition(":")
    others = [
        Swarm(f"0.0.0.0:{port}", [f"{host}:1"], secret=TEXT, name="second, again"),
        Swarm(join=[places[1]], secret=TEXT, name="new"),
    ]
    for swarm in others:
        stack.callback(swarm.close)
    until(lambda: len(again.peers()) == 5)


def test_a_directory_that_was_restarted_begins_no_second_swarm(stack: ExitStack) -> None:
    """Nobody's, at which all joined. Its peers have elected another, and a newcomer comes first."""
    secret = Secret.of(TEXT.encode())
    former = DirectoryServer("127.0.0.1", 0, secret)
    at = f"127.0.0.1:{former.port}"
    swarms = [Swarm(join=[at], secret=TEXT, name=name) for name in "ab"]
    for swarm in swarms:
        stack.callback(swarm.close)
        swarm.member.averages(SCHEMA)
    until(lambda: all(len(one.member.client.directories.places) == 3 for one in swarms))
    former.close()
    mean([one.member for one in swarms], [1.0, 2.0])
    again = DirectoryServer("127.0.0.1", former.port, secret, waits=60.0)
    stack.callback(again.close)
    newcomer = Swarm(join=[at], secret=TEXT, name="new")
    stack.callback(newcomer.close)
    assert newcomer.member.session == swarms[0].member.session
    until(lambda: len(newcomer.peers()) == 3)


def test_who_may_not_serve_does_not(stack: ExitStack) -> None:
    first = Swarm("127.0.0.1:0", secret=TEXT, name="first")
    stack.callback(first.close)
    swarms = [
        Swarm(join=[first.address], secret=TEXT, name=name, may_serve=name == "c") for name in "abc"
    ]
    for swarm in swarms:
        stack.callback(swarm.close)
        swarm.member.averages(SCHEMA)
    first.close()
    mean([one.member for one in swarms], [1.0, 2.0, 3.0])
    assert swarms[2].address
    swarms.pop().close()
    with pytest.raises(OperationTimeout):
        swarms[0].member.average(np.zeros(100, np.float32), 1.0, 3.0)
    for swarm in swarms:
        with pytest.raises(RendezvousError, match="doesn't listen"):
            _ = swarm.address


def test_two_that_were_elected_at_once_become_one(stack: ExitStack) -> None:
    first = Swarm("127.0.0.1:0", secret=TEXT, name="first")
    stack.callback(first.close)
    swarms = [Swarm(join=[first.address], secret=TEXT, name=name) for name in "abcd"]
    for swarm in swarms:
        stack.callback(swarm.close)
        swarm.member.averages(SCHEMA)
    until(lambda: all(len(one.member.client.directories.places) == 5 for one in swarms))
    for swarm in swarms[:2]:  # each takes itself for the next
        own = swarm.member.client.directories._own
        assert own is not None
        swarm.member.client.directories.prefer((first.member.address, 1), own)
    assert first._server is not None
    first._server.close()
    first.close()
    until(lambda: swarms[1]._server is not None)
    until(lambda: all(len(one.peers()) == 4 for one in swarms), seconds=20)
    mean([one.member for one in swarms], [1.0, 2.0, 3.0, 4.0])


@pytest.mark.long
def test_one_that_was_frozen_finds_the_others(stack: ExitStack) -> None:
    """It has the directory. When it goes on, that is in use by itself alone."""
    first = Process(stack, name="first", own=0.0, listen="127.0.0.1:0")
    second = Swarm("127.0.0.1:0", [first.address], secret=TEXT, name="second")
    third = Swarm(join=[first.address], secret=TEXT, name="third")
    for swarm in (second, third):
        stack.callback(swarm.close)
        swarm.member.averages(SCHEMA)
    third.wait_for(3, 10.0)
    os.kill(first.process.pid, signal.SIGSTOP)
    try:
        server = second._server
        assert server is not None
        until(lambda: names(server) == {"second", "third"}, seconds=40)
        mean([second.member, third.member], [1.0, 2.0])
    finally:
        os.kill(first.process.pid, signal.SIGCONT)
    until(lambda: names(server) == {"first", "second", "third"}, seconds=30)
    reports = [second.member.average(np.ones(2000, np.float32), 1.0, 20.0) for _ in range(3)]
    assert not any(one.failure for one in reports)
