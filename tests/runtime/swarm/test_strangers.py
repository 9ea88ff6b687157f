"""Strangers at a directory that listens, thousands of peers at once, and forked children: who is a
peer takes part all the same."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from benchmarks.micro.directory import Part
from benchmarks.micro.directory_peers import Peers
from lossycoll.runtime.control.events import Closed, Event, Received
from lossycoll.runtime.control.transport import Transport
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.swarm import directory_transport
from lossycoll.runtime.swarm import server as under_test
from lossycoll.runtime.swarm.directory_transport import swarm_keys
from lossycoll.runtime.swarm.member import SwarmMember
from lossycoll.runtime.swarm.protocol import (
    MOST_PEERS,
    VERSION,
    Join,
    Joined,
    Leave,
    Refused,
    pack,
    unpack,
)
from lossycoll.runtime.swarm.server import DirectoryServer
from tests.runtime.swarm.test_member import peers, together
from tests.support.transports import GREETING, HERE, Middle, stranger
from tests.support.waiting import until

TEXT = "a secret of tests"
SECRET = Secret.of(TEXT.encode())
FEW = 32
"""Strangers that a directory of these tests lets in at once."""


@pytest.fixture(params=[None, SECRET], ids=["clear", "sealed"])
def secret(request: pytest.FixtureRequest) -> Secret | None:
    found: Secret | None = request.param
    return found


@contextlib.contextmanager
def serving(secret: Secret | None) -> Iterator[tuple[DirectoryServer, tuple[str, int]]]:
    server = DirectoryServer(HERE, 0, secret)
    with closing(server):
        yield server, (HERE, server.port)


def means(members: list[SwarmMember]) -> None:
    """A round of all is right."""
    values = [np.full(500, float(number), np.float32) for number in range(len(members))]
    assert {one.failure for one in together(members, values)} == {""}
    assert all(np.allclose(one, np.mean(range(len(members)))) for one in values)


def test_strangers_without_end_keep_no_peer_out(
    secret: Secret | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a handshake, or nothing at all, again and again, by more than there is room for."""
    monkeypatch.setattr(under_test, "STRANGERS", FEW)
    over = threading.Event()

    def flood(place: tuple[str, int]) -> None:
        opened: list[socket.socket] = []
        while not over.is_set():
            with contextlib.suppress(OSError):
                opened.append(stranger(place, GREETING[: 10 * (len(opened) % 2)]))
            time.sleep(0.001)
            if len(opened) > 4 * FEW:
                opened.pop(0).close()
        for one in opened:
            one.close()

    with ExitStack() as stack:
        server, place = stack.enter_context(serving(secret))
        members = peers(stack, place, "a", secret)
        thread = threading.Thread(target=flood, args=(place,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        until(lambda: server._transport.counts["crowd"] > FEW)
        before = server._transport.counts["crowd"]
        members += peers(stack, place, "b", secret)
        means(members)
        until(lambda: server._transport.counts["crowd"] > before, "they come all the time")
        assert sorted(server._directory.names()) == ["a", "b"]


def test_who_is_slow_is_waited_for_by_nobody_and_not_for_ever(
    secret: Secret | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_transport, "HANDSHAKE_SECONDS", 1.0)
    with ExitStack() as stack:
        server, place = stack.enter_context(serving(secret))
        slow = stack.enter_context(stranger(place))
        slow.settimeout(20)
        members = peers(stack, place, "ab", secret)
        for byte in b"\xff" + bytes(8):  # as a greeting begins
            slow.send(bytes([byte]))
        means(members)
        with contextlib.suppress(ConnectionError):
            while slow.recv(100):
                pass
        until(lambda: sum(server._transport.counts[one] for one in ("handshake", "silent")))
        assert sorted(server._directory.names()) == ["a", "b"]
        means(members)


def test_what_was_recorded_of_a_peer_joins_nothing() -> None:
    """Whoever says again all that a sealed peer has said is a stranger."""
    with ExitStack() as stack:
        server, place = stack.enter_context(serving(SECRET))
        middle = stack.enter_context(closing(Middle(place)))
        with closing(Transport(swarm_keys(SECRET))) as peer:
            number = joined(peer, middle.place, "recorded", middle)
            peer.send(number, pack(Leave()))
            told(peer, lambda event: isinstance(event, Closed), middle)
        until(lambda: not server._directory.names())
        before = server._transport.counts["handshake"]
        with stranger(place, bytes(middle.said)) as again:
            again.settimeout(10)
            with contextlib.suppress(ConnectionError):
                while again.recv(1 << 16):
                    pass
        until(lambda: server._transport.counts["handshake"] > before)
        assert not server._directory.names()


def joined(peer: Transport, place: tuple[str, int], name: str, *others: Middle) -> int:
    """The connection of one that has."""
    number = peer.connect(place)
    peer.send(number, pack(Join(VERSION, name, os.urandom(16).hex(), MOST_PEERS, "0" * 16, 0)))
    told(peer, is_joined, *others)
    return number


def is_joined(event: Event) -> bool:
    return isinstance(event, Received) and isinstance(unpack(event.body), Joined)


def told(peer: Transport, wanted: Callable[[Event], bool], *others: Middle) -> None:
    def has_been() -> bool:
        for other in others:
            other._turn(0)
        return any(map(wanted, peer.poll(0.01)))

    until(has_been)


def test_another_version_is_refused_by_name(secret: Secret | None) -> None:
    """Whatever else its message has: the fields may be others in another version."""
    with ExitStack() as stack:
        server, place = stack.enter_context(serving(secret))
        keys = None if secret is None else swarm_keys(secret)
        peer = stack.enter_context(closing(Transport(keys)))
        peer.send(peer.connect(place), json.dumps(["join", VERSION + 1, "new"]).encode())
        heard: list[Event] = []

        def is_over() -> bool:
            heard.extend(peer.poll(0.01))
            return any(isinstance(event, Closed) for event in heard)

        until(is_over)
        (refused,) = [unpack(event.body) for event in heard if isinstance(event, Received)]
        assert isinstance(refused, Refused)
        assert refused.reason.startswith(f"join of version {VERSION + 1}, wanted {VERSION}; ")
        assert not server._directory.names()


# ---- many ----


@pytest.mark.parametrize(
    ("count", "text"),
    [
        pytest.param(600, TEXT, id="600-sealed"),
        pytest.param(MOST_PEERS, "", id="all-clear", marks=pytest.mark.long),
        pytest.param(MOST_PEERS, TEXT, id="all-sealed", marks=pytest.mark.long),
    ],
)
def test_as_many_as_there_is_room_for_come_at_once(count: int, text: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * count + 100:
        pytest.skip(f"{hard} descriptors for {count} connections, both ends")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        config = {"name": "many", "secret": text, "join": ""}
        with closing(Part("directory_serves", config)) as server:
            many = Peers(config | server.answer())
            many.join(count)
            server.tell()
            assert server.answer()["peers"] == count
            many.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- processes ----

FORKS = """
import os, sys, time
from lossycoll.runtime.keys.secret import secret_of
from lossycoll.runtime.swarm.server import DirectoryServer
server = DirectoryServer("127.0.0.1", 0, secret_of(sys.argv[1]) if sys.argv[1] else None)
print(server.port, flush=True)
sys.stdin.readline()
if os.fork() == 0:
    os.read(int(sys.argv[2]), 1)  # lives until the test is over
    os._exit(0)
print("forked", flush=True)
time.sleep(60)
"""


def test_peers_hear_at_once_of_a_killed_directory_whose_forked_child_lives(
    secret: Secret | None,
) -> None:
    lives, ends = os.pipe()
    text = TEXT if secret is not None else ""
    process = subprocess.Popen(
        [sys.executable, "-c", FORKS, text, str(lives)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[lives],
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        place = HERE, int(process.stdout.readline())
        with closing(Transport(swarm_keys(secret))) as peer:
            number = joined(peer, place, "a")
            process.stdin.write("fork\n")
            process.stdin.flush()
            assert process.stdout.readline() == "forked\n"
            process.send_signal(signal.SIGKILL)
            begin = time.monotonic()
            told(peer, lambda event: isinstance(event, Closed) and event.peer == number)
            assert time.monotonic() - begin < under_test.PATIENCE
    finally:
        os.close(ends)
        os.close(lives)
        process.kill()
        process.communicate(timeout=30)


def test_a_forked_child_disturbs_no_swarm_of_its_parent(secret: Secret | None) -> None:
    with ExitStack() as stack:
        _, place = stack.enter_context(serving(secret))
        members = peers(stack, place, "ab", secret)
        process = os.fork()
        if process == 0:
            try:
                assert all(one.client._transport.transport.closed for one in members)  # type: ignore[attr-defined]
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        means(members)


def test_a_directory_and_a_peer_have_four_threads_for_their_connections() -> None:
    def of_zeromq() -> int:
        names = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                names.append((task / "comm").read_text())
        return sum(name.startswith("ZMQbg") for name in names)

    until(lambda: of_zeromq() == 0, "those of other tests end")
    before = set(threading.enumerate())
    with ExitStack() as stack:
        _, place = stack.enter_context(serving(SECRET))
        peers(stack, place, "a", SECRET)
        more = {one.name for one in threading.enumerate() if one not in before}
        assert more == {"lossycoll-directory", "lossycoll-peer", "lossycoll-nat-agent"}
        assert of_zeromq() == 2
