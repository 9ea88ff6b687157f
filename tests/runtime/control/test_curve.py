"""Secrets of connections: who meets whom, and what somebody on the way can read and do."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from lossycoll.runtime.control.context import Keys, keys_of
from lossycoll.runtime.control.events import Closed, Event, Received
from lossycoll.runtime.control.schema import Address
from lossycoll.runtime.control.transport import Transport
from lossycoll.runtime.keys.secret import Secret
from tests.support.transports import HERE, Frame, Middle, count, hear, listening, meet, pair
from tests.support.waiting import until

OURS = Secret.of(b"a secret of tests")
ANOTHER = Secret.of(b"another secret of tests")


def test_other_secrets_planes_and_ends_in_clear_dont_meet() -> None:
    server, place = listening(keys_of(OURS, "tests"))
    with contextlib.closing(server):
        for keys in (keys_of(ANOTHER, "tests"), keys_of(OURS, "others"), None):
            with contextlib.closing(Transport(keys)) as client:
                peer = client.connect(place)
                client.send(peer, b"hello")
                found = hear(client, count(1), server)
                assert found == [Closed(peer, "closed by whoever listens there")], keys
        assert server.poll(0.05) == []
        assert server.counts["handshake"] == 3
    server, place = listening()
    with (
        contextlib.closing(server),
        contextlib.closing(Transport(keys_of(OURS, "tests"))) as client,
    ):
        peer = client.connect(place)
        client.send(peer, b"hello")
        assert hear(client, count(1), server) == [Closed(peer, "closed by whoever listens there")]
        assert server.poll(0.05) == []


def test_a_caller_that_isnt_in_the_roster_is_refused() -> None:
    """Even one that has learnt the listener's key."""
    keys = keys_of(OURS, "tests")
    server, place = listening(keys)
    wrong = Keys("tests", keys.listener, keys_of(ANOTHER, "tests").caller)
    with contextlib.closing(server), contextlib.closing(Transport(None)) as client:
        client.keys = wrong
        peer = client.connect(place)
        client.send(peer, b"hello")
        assert hear(client, count(1), server) == [Closed(peer, "closed by whoever listens there")]
        assert server.poll(0.05) == []


def test_keys_are_one_secrets_one_planes_and_one_roles_and_arent_shown() -> None:
    pairs = [
        pair
        for secret in (OURS, ANOTHER)
        for plane in ("a", "b")
        for pair in (keys_of(secret, plane).listener, keys_of(secret, plane).caller)
    ]
    assert len({pair.public for pair in pairs}) == len({pair.secret for pair in pairs}) == 8
    assert keys_of(OURS, "a") == keys_of(OURS, "a")
    assert pairs[0].secret.decode() not in repr(keys_of(OURS, "a"))


def test_nothing_that_is_said_can_be_read_on_the_way() -> None:
    """Whoever passes the bytes on sees no message and no key; in clear all of it."""
    for keys in (keys_of(OURS, "tests"), None):
        with pair(keys) as (server, client, place), recorded(place) as (middle, seen):
            _, here = meet(server, client, middle)
            client.send(here, b"planted text")
            hear(server, count(1), client)
            data = bytes(seen)
        assert (b"planted" in data) == (b"hello" in data) == (b"welcome" in data) == (keys is None)
        if keys is not None:
            for one in (keys.listener, keys.caller):
                from zmq.utils import z85

                assert z85.decode(one.public) not in data
                assert one.public not in data


def changed(frame: Frame) -> Frame:
    at = random.Random(1).randrange(8 * len(frame[1]))
    body = bytearray(frame[1])
    body[at // 8] ^= 1 << at % 8
    return frame[0], bytes(body)


ATTACKS: dict[str, Callable[[list[Frame], Middle], list[Frame]]] = {
    "changed": lambda frames, middle: [changed(frames[0]), frames[1]],
    "left out": lambda frames, middle: frames[1:],
    "repeated": lambda frames, middle: [middle.seen[0][-3], *frames],
    "swapped": lambda frames, middle: frames[::-1],
    "cut": lambda frames, middle: [(frames[0][0], frames[0][1][:-1]), frames[1]],
    "turned round": lambda frames, middle: [middle.seen[1][-1], *frames],
    "invented": lambda frames, middle: [(0, os.urandom(40)), *frames],
    "empty": lambda frames, middle: [(0, b""), *frames],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_whatever_is_done_to_sealed_messages_isnt_believed(attack: str) -> None:
    """By whoever passes them on: nor is anything that follows. The connection ends, or is silent
    from then on."""
    with (
        pair(keys_of(OURS, "tests")) as (server, client, place),
        contextlib.closing(Middle(place)) as middle,
    ):
        there, here = meet(server, client, middle.place, middle)
        for body in (b"one", b"two"):
            assert server.send(there, body)
            assert client.send(here, body)
        hear(client, count(2), middle)
        assert hear(server, count(2), middle) == [Received(there, b"one"), Received(there, b"two")]
        middle.attack = lambda frames: ATTACKS[attack](frames, middle)
        assert client.send(here, b"three")
        assert client.send(here, b"four")
        found: list[Event] = []

        def noticed() -> bool:
            middle._turn(0)
            found.extend(server.poll(0.01))
            return bool(found or server.counts["forged"])

        until(noticed)
        client.send(here, b"five")
        for _ in range(5):
            noticed()
        assert [type(event) for event in found] in ([], [Closed])
        assert found or server.counts["forged"] == 1


@contextlib.contextmanager
def recorded(place: Address) -> Iterator[tuple[Address, bytearray]]:
    """A place that passes on to another one, and all bytes that went either way."""
    seen, ends = bytearray(), list[socket.socket]()
    with socket.create_server((HERE, 0)) as front:

        def serve() -> None:
            with contextlib.suppress(OSError):
                near, _ = front.accept()
                far = socket.create_connection(place)
                ends.extend((near, far))
                back = threading.Thread(target=copy, args=(far, near))
                back.start()
                copy(near, far)
                back.join()

        def copy(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    seen.extend(data)
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        yield front.getsockname(), seen
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    for end in ends:
        end.close()
