"""Thousands of peers: a directory's work for each of them is what it is in a small swarm, and what
it doesn't look at would change nothing."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from lossycoll.errors import OptionError
from lossycoll.runtime.control.events import Received
from lossycoll.runtime.control.transport import Transport
from lossycoll.runtime.swarm import service as reception_module
from lossycoll.runtime.swarm.client import DirectoryClient
from lossycoll.runtime.swarm.directory import COME, GROUP_SIZE, LEASE, Directory
from lossycoll.runtime.swarm.directory_transport import ZmqDirectoryTransport
from lossycoll.runtime.swarm.protocol import (
    MOST_DIRECTORIES,
    MOST_MEMBERS,
    MOST_NAMES,
    MOST_PEERS,
    START,
    VERSION,
    Averages,
    Directories,
    Group,
    Here,
    Join,
    Joined,
    Leave,
    Message,
    Peers,
    Present,
    Ready,
    Serves,
    Who,
    pack,
    unpack,
)
from lossycoll.runtime.swarm.server import DirectoryServer
from lossycoll.runtime.swarm.service import DirectoryService, PeerSession
from tests.support.waiting import until

SCHEMA, SESSION = "5c" * 16, "5" * 16


class Clock:
    """In seconds, which go on when they are told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def joins(number: int) -> Join:
    return Join(VERSION, f"peer {number}", f"{number:032x}", MOST_PEERS, "0" * 16, 0)


class Ends:
    """Both ends of connections that are never full, without a socket."""

    broken = ""
    reached = True

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.came: list[bytes] = []

    def say(self, *messages: Message) -> None:
        self.said += map(pack, messages)

    def read(self) -> list[bytes]:
        found, self.said = self.said, []
        return found

    def write(self, body: bytes) -> None:
        self.came.append(body)

    @property
    def heard(self) -> list[Message]:
        return list(map(unpack, self.came))

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class Many:
    """Peers of a service, which say what real ones do."""

    def __init__(self, count: int, *, takes_over: bool = False) -> None:
        self.clock = Clock()
        self.directory = Directory(self.clock, session=SESSION)
        self.service = DirectoryService(self.directory)
        self.ends = [Ends() for _ in range(count)]
        self.sessions: list[PeerSession] = []
        for number, end in enumerate(self.ends):
            self.sessions.append(self.service.admit(end))
            place = f"10.{number >> 8}.{number & 255}.1"
            had = {"number": number, "session": SESSION} if takes_over else {}
            self.say(number, replace(joins(number), **had))  # type: ignore[arg-type]
            self.say(number, Here(place, 4000), Serves(place, 5000, 1), Averages(SCHEMA, ""))

    def say(self, number: int, *messages: Message) -> None:
        """As the thread of a directory hears it."""
        self.ends[number].say(*messages)
        self.service.hear(self.sessions[number])
        self.service.turn()
        self.service.wait()

    def starts(self) -> None:
        """A round: all are ready, one after the other."""
        order = list(range(len(self.ends)))
        random.Random(1).shuffle(order)
        for number in order:
            self.say(number, Ready(1.0))

    def groups(self) -> list[Group]:
        """What peers have been told of since this was called last, by peer."""
        found = [group for end in self.ends for group in end.heard if isinstance(group, Group)]
        for end in self.ends:
            end.came.clear()
        return found


def rows_of(work: Any) -> int:
    """How many lines of a directory, and turns of loops in it, some work takes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        file = frame.f_code.co_filename
        if "swarm/" not in file or file.endswith(("protocol.py", "test_many_peers.py")):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_two_thousand_peers_form_the_groups_of_their_rounds() -> None:
    many = Many(2048)
    numbers = [peer.number for peer in many.directory.peers.values()]
    assert sorted(numbers) == list(range(2048))
    seen: set[int] = set()
    for turn in range(4):
        many.starts()
        told = many.groups()
        assert len(told) == 2048
        groups = {one.number: one for one in told}
        members = [member.number for group in groups.values() for member in group.members]
        assert sorted(members) == numbers, "each in one group"
        assert all(one in {m.number for m in told[one].members} for one in numbers)
        assert {one.round for one in told} == {turn}
        assert max(len(one.members) for one in groups.values()) <= GROUP_SIZE
        assert len(groups) < 2 * 2048 / (GROUP_SIZE / 3)
        assert not seen & set(groups)
        seen |= set(groups)


def test_the_work_for_a_peer_does_not_grow_with_the_swarm() -> None:
    """Of joining, of a round, and of leaving: if it grew with the swarm it would be eight times as
    much. Lines are as long in both, and there is one axis more, which is half of the work more."""

    def work(count: int) -> dict[str, float]:
        found: dict[str, Any] = {}

        def comes() -> None:
            found["many"] = Many(count)

        def starts() -> None:
            found["many"].starts()

        def leaves() -> None:
            for number in random.Random(2).sample(range(count), count):
                found["many"].say(number, Leave())

        took = {
            "come": rows_of(comes),
            "round": rows_of(starts),
            "leave": rows_of(leaves),
        }
        return {name: lines / count for name, lines in took.items()}

    few, many = work(8**2), work(8**3)
    for name, lines in many.items():
        assert lines < 2 * few[name], name


def test_a_full_swarm_says_so_and_has_room_again() -> None:
    directory = Directory(Clock(), session=SESSION)
    for number in range(MOST_PEERS):
        answer = directory.join(joins(number))
        assert isinstance(answer, Joined)
        assert answer.number == number
    refused = directory.join(joins(MOST_PEERS))
    assert not isinstance(refused, Joined)
    assert refused.reason == f"the swarm is full: {MOST_PEERS} peers"
    assert directory.free == 0
    directory.lost(1234)
    answer = directory.join(joins(MOST_PEERS))
    assert isinstance(answer, Joined)
    assert answer.number == 1234


def test_names_of_thousands_come_in_some_messages() -> None:
    many = Many(MOST_NAMES + 200)
    end = many.ends[7]
    end.came.clear()
    many.say(7, Who())
    told = [one for one in end.heard if isinstance(one, Peers)]
    assert [(len(one.names), one.more) for one in told] == [(MOST_NAMES, 1), (200, 0)]
    assert [name for one in told for name in one.names] == [
        f"peer {number}" for number in range(MOST_NAMES + 200)
    ]


def test_all_hear_once_who_is_present_after_a_directory_has_taken_over() -> None:
    many = Many(300, takes_over=True)
    many.clock.now += COME + 0.1
    for end in many.ends:
        end.came.clear()
    many.service.turn()
    assert any(not end.came for end in many.ends), "some in each turn"
    for _ in range(3):
        assert many.service.wait() <= 0.001
        many.service.turn()
    for end in many.ends:
        (told,) = [one for one in end.heard if isinstance(one, Present)]
        assert sorted(told.starts) == [f"{number:032x}"[:START] for number in range(300)]


def test_a_peer_puts_names_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception_module, "MOST_NAMES", 2)
    server = DirectoryServer("127.0.0.1", 0)
    peers = []
    try:
        for number in range(5):
            peers.append(
                DirectoryClient(
                    [("127.0.0.1", server.port)],
                    f"peer {number}",
                    ZmqDirectoryTransport(None),
                )
            )
            peers[-1].connect(10.0)
        wanted = tuple(f"peer {number}" for number in range(5))
        for one in peers:
            assert one.names(10.0) == one.names(10.0) == wanted
    finally:
        for one in peers:
            one.close()
        server.close()


def test_all_hear_of_a_directory_only_if_they_may_turn_to_it() -> None:
    """The list has 16 places: what is said of others changes it for nobody. And if it changes all
    the time, all hear of it a number of times that has nothing to do with how often."""
    many = Many(64)
    wanted = tuple(("10.9.9.9", 6000 + number) for number in range(MOST_DIRECTORIES))

    def lists(number: int) -> list[Directories]:
        return [one for one in many.ends[number].heard if isinstance(one, Directories)]

    for number in range(64):
        many.say(number, Serves("10.9.9.9", 6000 + number))

    def has_been_told() -> bool:
        many.service.turn()
        return lists(63)[-1].addresses == wanted

    until(has_been_told)
    told = len(lists(63))
    for number in range(20, 64):
        many.say(number, Serves("10.8.8.8", 6000 + number))
    assert len(lists(63)) == told
    many.service._list_at = float("inf")  # they have just been told
    for number in range(20):
        many.say(number, Leave())
    assert len(lists(63)) == told
    many.service._list_at = 0.0
    many.service.turn()
    assert len(lists(63)) == told + 1
    assert lists(63)[-1].addresses[0] == ("10.8.8.8", 6020)


@pytest.mark.parametrize("text", [f"{MOST_MEMBERS + 1}", f"2x{MOST_MEMBERS + 1}"])
def test_rows_that_are_longer_than_a_group_may_be_are_refused(text: str) -> None:
    directory = Directory(Clock(), session=SESSION)
    directory.join(joins(0))
    why = f"a grid of {text} has rows of more than {MOST_MEMBERS} cells: no group is larger"
    assert directory.averages(0, Averages(SCHEMA, text)).reason == why
    with pytest.raises(OptionError, match="no group is larger"):
        Directory(Clock(), shape=tuple(map(int, text.split("x"))))
    assert not directory.averages(0, Averages(SCHEMA, f"{MOST_MEMBERS}")).reason


@pytest.mark.parametrize("seed", range(12))
def test_what_is_not_looked_at_would_change_nothing(seed: int) -> None:
    """Peers come, are ready, wait and go at random. After each step, and just before the next time
    at which the directory wants to look again, a look at all lines finds no further group."""
    draw, clock = random.Random(seed), Clock()
    shape = draw.choice([(), (), (4, 4), (3, 3, 3)])
    directory = Directory(clock, shape=shape, most=4, session=SESSION)
    came = formed = 0

    def finds_nothing_more() -> None:
        all_of_it = copy.deepcopy(directory)
        all_of_it._note_all()
        assert all_of_it.form() == []

    for _ in range(400):
        peers = list(directory.peers.values())
        turn = draw.random()
        if turn < 0.15 and directory.free and len(peers) < 24:
            answer = directory.join(joins(came))
            assert isinstance(answer, Joined)
            directory.here(answer.number, Here("10.0.0.1", 4000))
            came += 1
        elif turn < 0.2 and peers:
            directory.lost(draw.choice(peers).number)
        elif turn < 0.35 and peers:
            directory.averages(draw.choice(peers).number, Averages(SCHEMA, ""))
        elif turn < 0.38 and peers:
            one = draw.choice(peers)
            directory.report_unreachable(
                one.number,
                [directory.peers[k].incarnation for k in one.group if k in directory.peers],
            )
        elif turn < 0.4:
            directory.takes(directory.round + draw.randrange(3), 5.0)
        elif turn < 0.85 and peers:
            directory.ready(draw.choice(peers).number, draw.choice([0.0, 1.0, 1.0, 1.0]))
        else:
            wakes = directory.wakes()
            if wakes is not None and wakes > clock.now:
                clock.now += 0.999 * (wakes - clock.now)
                finds_nothing_more()
                clock.now = wakes
        for peer in directory.peers.values():
            peer.seen = clock.now
        formed += len(directory.form())
        finds_nothing_more()
    assert formed > 20


def test_a_peer_that_is_silent_is_found_whenever_it_came() -> None:
    clock = Clock()
    directory = Directory(clock, session=SESSION)
    lost: list[int] = []
    for number in range(40):
        directory.join(joins(number))
        clock.now += 1.0
        for one in directory.peers:
            if one % 3:
                directory.beat(one)
        found = directory.overdue()
        assert all(clock.now - directory.peers[one].seen > LEASE for one in found)
        for one in found:
            directory.lost(one)
        lost += found
        wakes = directory.wakes()
        silent = [peer.seen + LEASE for peer in directory.peers.values()]
        assert wakes is None or wakes <= min(silent)
    assert lost == list(range(0, 40 - int(LEASE), 3))


FEW_DESCRIPTORS = """
import resource, sys
hard = min(2000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (48, int(sys.argv[1]) or hard))
from lossycoll.runtime.swarm.server import DirectoryServer
server = DirectoryServer("127.0.0.1", 0)
print(server.port, flush=True)
sys.stdin.read()
server.close()
"""


@pytest.mark.parametrize("most", [0, 48])
def test_a_directory_takes_the_descriptors_that_it_may_have(most: int) -> None:
    """And says how to let it have more, if those are too few."""
    count, places, said, transports = 80, 0, "", [Transport(), Transport()]
    process = subprocess.Popen(
        [sys.executable, "-c", FEW_DESCRIPTORS, str(most)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for number in range(count):
            transport = transports[number % 2]
            transport.send(transport.connect(("127.0.0.1", port)), pack(joins(number)))

        def joined() -> int:
            nonlocal places
            events = [event for one in transports for event in one.poll(0.01)]
            found = [one for one in events if isinstance(one, Received)]
            places += sum(isinstance(unpack(one.body), Joined) for one in found)
            return places

        if most:
            assert process.stderr is not None
            said = process.stderr.readline()
        else:
            until(lambda: joined() == count)
    finally:
        for one in transports:
            one.close()
        process.communicate("", timeout=30)
    assert not most or "no descriptor is left for another peer" in said
    assert not most or "ulimit -n" in said
