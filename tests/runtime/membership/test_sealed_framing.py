"""Sealed connections: what is written arrives, and what anybody changes ends the connection."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator

import pytest

from lossycoll.runtime.membership.framing import LONGEST, Framed
from lossycoll.runtime.membership.sealed_framing import (
    LONGEST_GREETING,
    NONCE_BYTES,
    SealedFramed,
)

KEY = bytes(range(32))


class Middle:
    """What goes from one end to another, as somebody sees it who may change it."""

    def __init__(self, key: bytes = KEY, other_key: bytes = KEY) -> None:
        left, self._left = socket.socketpair()
        right, self._right = socket.socketpair()
        self.ends = (
            SealedFramed(left, key, connects=True),
            SealedFramed(right, other_key, connects=False),
        )
        self.seen: tuple[list[bytes], list[bytes]] = ([], [])
        for end in (self._left, self._right):
            end.setblocking(False)

    def pass_on(self, way: int, frames: list[bytes] | None = None) -> list[bytes]:
        """Takes the frames that end ``way`` has sent, and hands ``frames``, or those, to the
        other; returns what that one reads."""
        here, there = (self._left, self._right) if way == 0 else (self._right, self._left)
        sent = self.take(here)
        self.seen[way].extend(sent)
        for body in sent if frames is None else frames:
            there.sendall(len(body).to_bytes(4, "big") + body)
        return self.ends[1 - way].read()

    @staticmethod
    def take(end: socket.socket) -> list[bytes]:
        data = b""
        while True:
            try:
                data += end.recv(1 << 20)
            except BlockingIOError:
                break
        found = []
        while data:
            size = int.from_bytes(data[:4], "big")
            found.append(data[4 : 4 + size])
            data = data[4 + size :]
        return found

    def meet(self) -> None:
        """Both nonces are through."""
        self.ends[0].write(b"hello")
        assert self.pass_on(0) == []
        assert self.pass_on(1) == []
        assert self.pass_on(0) == [b"hello"]

    def close(self) -> None:
        for end in (*self.ends, self._left, self._right):
            end.close()


@pytest.fixture
def middle() -> Iterator[Middle]:
    made = Middle()
    yield made
    made.close()


def test_messages_go_both_ways_and_none_is_readable(middle: Middle) -> None:
    middle.meet()
    for size in (0, 1, 1000, 30_000):
        text = os.urandom(size)
        for way in (0, 1):
            middle.ends[way].write(text)
            middle.ends[way].write(b"planted text")
            assert middle.pass_on(way) == [text, b"planted text"]
    frames = [*middle.seen[0], *middle.seen[1]]
    assert len(frames) == 2 + 1 + 16
    assert not any(b"planted" in frame or b"hello" in frame for frame in frames)


def test_the_longest_message_fits() -> None:
    left, right = socket.socketpair()
    a, b = SealedFramed(left, KEY, connects=True), SealedFramed(right, KEY, connects=False)
    text = os.urandom(LONGEST - 16)
    for body in (b"a greeting", text, b"another"):
        a.write(body)
    found: list[bytes] = []
    while len(found) < 3 and not (a.broken or b.broken):
        found += b.read()
        a.read()
        a.flush()
        b.flush()
    assert found == [b"a greeting", text, b"another"]
    a.close()
    b.close()


def test_what_is_changed_left_out_repeated_or_turned_round_ends_the_connection() -> None:
    def changed(frames: list[bytes], seen: tuple[list[bytes], list[bytes]]) -> list[bytes]:
        at = random.Random(1).randrange(8 * len(frames[0]))
        body = bytearray(frames[0])
        body[at // 8] ^= 1 << at % 8
        return [bytes(body)]

    attacks = {
        "changed": changed,
        "left out": lambda frames, seen: frames[1:],
        "repeated": lambda frames, seen: [seen[0][-1], *frames],
        "swapped": lambda frames, seen: frames[::-1],
        "cut": lambda frames, seen: [frames[0][:-1]],
        "turned round": lambda frames, seen: [seen[1][-1]],
        "invented": lambda frames, seen: [os.urandom(40)],
        "empty": lambda frames, seen: [b""],
    }
    for name, attack in attacks.items():
        middle = Middle()
        middle.meet()
        for _ in range(2):  # the second has the number that the other end waits for
            middle.ends[1].write(b"back")
        middle.pass_on(1)
        middle.ends[0].write(b"first")
        middle.ends[0].write(b"second")
        sent = Middle.take(middle._left)
        assert len(sent) == 2
        found = middle.pass_on(0, attack(sent, middle.seen))
        receiver = middle.ends[1]
        assert (found, receiver.broken, receiver.malformed) == ([], True, True), name
        middle.close()


def test_ends_with_different_keys_do_not_meet() -> None:
    middle = Middle(other_key=bytes(32))
    middle.ends[0].write(b"hello")
    middle.pass_on(0)
    middle.pass_on(1)
    assert middle.pass_on(0) == []
    assert middle.ends[1].malformed
    middle.close()


def test_a_connection_that_was_recorded_opens_nowhere(middle: Middle) -> None:
    middle.meet()
    recorded = middle.seen[0]
    later = Middle()
    assert later.pass_on(0, recorded[:1]) == []  # the recorded nonce is taken
    assert later.pass_on(0, recorded[1:]) == []
    assert later.ends[1].malformed
    later.close()


def test_an_end_that_speaks_in_clear_is_refused() -> None:
    left, right = socket.socketpair()
    plain, sealed = Framed(left), SealedFramed(right, KEY, connects=False)
    plain.write(b'["hello"]')
    assert sealed.read() == []
    assert sealed.malformed
    plain.close()
    sealed.close()


def test_nonces_differ() -> None:
    seen = set()
    for _ in range(20):
        middle = Middle()
        middle.meet()
        seen |= {middle.seen[0][0], middle.seen[1][0]}
        middle.close()
    assert len(seen) == 40
    assert {len(nonce) for nonce in seen} == {NONCE_BYTES}


@pytest.mark.parametrize("met", [False, True])
def test_a_stranger_is_not_waited_for(met: bool) -> None:
    """Before its first sealed frame an end may say little: no memory is kept for it."""
    left, right = socket.socketpair()
    with right:
        end = SealedFramed(left, KEY, connects=False)
        if met:
            right.sendall(NONCE_BYTES.to_bytes(4, "big") + bytes(NONCE_BYTES))
            assert end.read() == []
            assert not end.broken
        size = LONGEST_GREETING + 1 if met else NONCE_BYTES + 1
        right.sendall(size.to_bytes(4, "big"))
        assert end.read() == []
        assert end.malformed
        assert end.broken
        end.close()
