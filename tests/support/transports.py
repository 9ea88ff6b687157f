"""Transports over loopback, strangers, and somebody between two ends of a connection."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from lossycoll.runtime.control.context import Keys
from lossycoll.runtime.control.descriptors import listener
from lossycoll.runtime.control.events import Connected, Event, Received
from lossycoll.runtime.control.schema import Address
from lossycoll.runtime.control.transport import Transport

HERE = "127.0.0.1"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Of ZMTP, in clear."""
GREETING_BYTES = 64
Frame: TypeAlias = tuple[int, bytes]
"""Of ZMTP: flags, and the body."""


def listening(keys: Keys | None = None, **rest: object) -> tuple[Transport, Address]:
    made = Transport(keys, **rest)  # type: ignore[arg-type]
    end = listener(HERE, (0, 0), 64)
    place = HERE, int(end.getsockname()[1])
    made.listen(end)
    return made, place


@contextlib.contextmanager
def pair(keys: Keys | None = None) -> Iterator[tuple[Transport, Transport, Address]]:
    """One that listens, and another one."""
    server, place = listening(keys)
    with contextlib.closing(server), contextlib.closing(Transport(keys)) as client:
        yield server, client, place


def hear(
    one: Transport,
    wanted: Callable[[list[Event]], bool],
    *others: Transport | Middle,
    seconds: float = 30,
) -> list[Event]:
    """What ``one`` is told until that is as ``wanted``, while ``others`` run."""
    found: list[Event] = []
    end = time.monotonic() + seconds
    while not wanted(found) and time.monotonic() < end:
        found += one.poll(0.01)
        for other in others:
            other._turn(0)
    assert wanted(found), found
    return found


def count(wanted: int) -> Callable[[list[Event]], bool]:
    return lambda found: len(found) >= wanted


def meet(server: Transport, client: Transport, place: Address, *others: Middle) -> tuple[int, int]:
    """A connection: its number at the server, and at the client."""
    peer = client.connect(place)
    assert client.send(peer, b"hello")
    connected, hello = hear(server, count(2), client, *others)
    assert isinstance(connected, Connected)
    assert (connected.address, connected.own) == (HERE, HERE)
    assert hello == Received(connected.peer, b"hello")
    server.admit(connected.peer)
    assert server.send(connected.peer, b"welcome")
    assert hear(client, count(2), server, *others) == [
        Connected(peer, HERE, HERE),
        Received(peer, b"welcome"),
    ]
    return connected.peer, peer


def stranger(place: Address, said: bytes = b"", source: str = HERE) -> socket.socket:
    made = socket.create_connection(place, source_address=(source, 0))
    made.sendall(said)
    return made


class Middle:
    """Passes a connection's frames on to another place; somebody may change them there.

    ``seen``: those of each direction. ``said``: all bytes to the listener. ``attack``: what becomes
    of the next two frames to it.
    """

    def __init__(self, place: Address) -> None:
        self._front = socket.create_server((HERE, 0))
        self._front.setblocking(False)
        self.place: Address = self._front.getsockname()
        self._leads_to = place
        self._ends: list[socket.socket] = []
        self._came = [bytearray(), bytearray()]
        self._greeting = [GREETING_BYTES, GREETING_BYTES]
        """As much of each end's isn't through yet."""
        self.seen: tuple[list[Frame], list[Frame]] = ([], [])
        self.said = bytearray()
        self.attack: Callable[[list[Frame]], list[Frame]] | None = None
        self._held: list[Frame] = []

    def _turn(self, seconds: float) -> None:
        if not self._ends:
            with contextlib.suppress(BlockingIOError):
                near, _ = self._front.accept()
                self._ends = [near, socket.create_connection(self._leads_to)]
                for end in self._ends:
                    end.setblocking(False)
        for way, end in enumerate(self._ends):
            with contextlib.suppress(BlockingIOError, ConnectionError):
                data = end.recv(1 << 16)
                self._came[way] += data
                self.said += data if way == 0 else b""
                if not data:
                    with contextlib.suppress(OSError):  # it has ended, too
                        self._ends[1 - way].shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                self._pass_on(way)

    def _pass_on(self, way: int) -> None:
        came, there = self._came[way], self._ends[1 - way]
        greeting = came[: self._greeting[way]]
        there.sendall(greeting)
        del came[: len(greeting)]
        self._greeting[way] -= len(greeting)
        while self._greeting[way] == 0 and (frame := taken(came)) is not None:
            self.seen[way].append(frame)
            frames = [frame]
            if way == 0 and self.attack is not None:
                self._held.append(frame)
                if len(self._held) < 2:
                    continue
                frames, self.attack = self.attack(self._held), None
            for flags, body in frames:
                there.sendall(bytes([flags | 2]) + len(body).to_bytes(8, "big") + body)

    def close(self) -> None:
        for end in (self._front, *self._ends):
            end.close()


def taken(came: bytearray) -> Frame | None:
    """The oldest frame that is there as a whole."""
    size = 8 if came and came[0] & 2 else 1
    length = int.from_bytes(came[1 : 1 + size], "big")
    if len(came) < 1 + size or len(came) < 1 + size + length:
        return None
    found = came[0] & ~2, bytes(came[1 + size : 1 + size + length])
    del came[: 1 + size + length]
    return found
