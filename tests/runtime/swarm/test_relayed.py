"""Connections whose frames another server carries, with somebody among them who can write there."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from lossycoll.runtime.control.transport import LONGEST
from lossycoll.runtime.swarm.valkey_relay import MOST_WAITING, NONCE_BYTES, RelayedConnection

KEY = bytes(range(32))


class Middle:
    """Both ends, and what goes from each to the other."""

    def __init__(self, key: bytes | None, other_key: bytes | None = KEY) -> None:
        self.sent: tuple[list[bytes], list[bytes]] = ([], [])
        self.there = True
        self.counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        keys = (key, key if key is None else other_key)
        self.ends = [
            RelayedConnection(self._sends(way), keys[way], self.counts[way], connects=way == 0)
            for way in (0, 1)
        ]

    def _sends(self, way: int):  # type: ignore[no-untyped-def]
        def send(frame: bytes) -> bool:
            self.sent[way].append(frame)
            return self.there

        return send

    def carry(self) -> list[list[bytes]]:
        """All that is on its way, until nothing is. Returns what each end has read."""
        read: list[list[bytes]] = [[], []]
        while any(self.sent):
            read = [[*had, *more] for had, more in zip(read, self.carry_once(), strict=True)]
        return read

    def carry_once(self) -> list[list[bytes]]:
        """What is on its way, one way and then the other."""
        read: list[list[bytes]] = [[], []]
        for way in (0, 1):
            frames, self.sent[way][:] = list(self.sent[way]), []
            for frame in frames:
                self.ends[1 - way].put(frame)
            read[1 - way] = self.ends[1 - way].read()
        return read


@pytest.mark.parametrize("key", [None, KEY], ids=["clear", "sealed"])
def test_messages_come_in_order_both_ways(key: bytes | None) -> None:
    middle = Middle(key)
    for number in range(20):
        middle.ends[0].write(b"there %d" % number)
    assert middle.carry() == [[], [b"there %d" % number for number in range(20)]]
    middle.ends[1].write(b"back")
    middle.ends[0].write(b"")
    assert middle.carry() == [[b"back"], [b""]]
    assert middle.counts == (Counter(), Counter())
    assert not any(end.broken for end in middle.ends)


def test_what_somebody_puts_among_them_is_counted_and_left_out() -> None:
    """New, changed, repeated, or of the other direction: all else comes as it was sent."""
    middle, draw = Middle(KEY), random.Random(2)
    middle.ends[0].write(b"first")
    middle.carry()
    put = 0
    for number in range(50):
        middle.ends[0].write(b"%d" % number)
        (frame,) = middle.sent[0]
        changed = bytearray(frame)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        middle.ends[1].write(b"back")
        (other,) = middle.sent[1]
        strange = [bytes(changed), b"", draw.randbytes(16), draw.randbytes(40), other, frame[:-1]]
        put += len(strange) + 1
        middle.sent[0][:] = [*strange, frame, frame]
        assert middle.carry() == [[b"back"], [b"%d" % number]]
    assert middle.counts == (Counter(), Counter(forged=put))


def test_a_frame_that_is_turned_round_does_not_open() -> None:
    """The next one of the other direction, which has the number that this end waits for."""
    middle = Middle(KEY)
    middle.ends[0].write(b"first")
    middle.carry()
    middle.ends[1].write(b"back")
    middle.carry()
    middle.ends[0].write(b"there")
    (frame,) = middle.sent[0]
    middle.sent[0].clear()
    middle.ends[0].put(frame)
    assert middle.ends[0].read() == []
    assert middle.counts[0] == Counter(forged=1)


def test_a_connection_that_was_recorded_opens_nowhere() -> None:
    """Its nonce is taken, and nothing that follows."""
    middle, later, recorded = Middle(KEY), Middle(KEY), list[bytes]()
    middle.ends[0].write(b"planted text")
    while any(middle.sent):
        recorded += middle.sent[0]
        middle.carry_once()
    assert len(recorded) == 2
    assert not any(b"planted" in frame for frame in recorded)
    for frame in recorded:
        later.ends[1].put(frame)
    assert later.ends[1].read() == []
    assert later.counts[1] == Counter(forged=1)


def test_nonces_differ() -> None:
    ends = [end for _ in range(20) for end in Middle(KEY).ends]
    nonces = {end._nonce for end in ends}
    assert len(nonces) == 40
    assert {len(nonce) for nonce in nonces} == {NONCE_BYTES}


def test_what_is_left_out_on_the_way_ends_all_that_follows() -> None:
    """So the other end hears nothing more, and makes another connection."""
    middle = Middle(KEY)
    middle.ends[0].write(b"first")
    middle.carry()
    middle.ends[0].write(b"taken away")
    middle.sent[0].clear()
    for number in range(5):
        middle.ends[0].write(b"%d" % number)
    assert middle.carry() == [[], []]
    assert middle.counts[1] == Counter(forged=5)


@pytest.mark.parametrize("what", ["another secret", "a nonce before the other end's"])
def test_nothing_opens_where_keys_differ(what: str) -> None:
    middle = Middle(KEY, bytes(32) if what == "another secret" else KEY)
    if what != "another secret":
        middle.ends[0].put(bytes(16))
    middle.ends[0].write(b"there")
    middle.carry()
    middle.ends[1].write(b"back")
    assert middle.carry() == [[], []]
    assert middle.counts[0]["forged"]


def test_frames_that_cannot_be() -> None:
    middle = Middle(KEY)
    middle.ends[1].put(bytes(15))  # no nonce
    middle.ends[1].put(bytes(LONGEST + 17))
    middle.ends[0].write(b"there")
    assert middle.carry() == [[], [b"there"]]
    assert middle.counts[1] == Counter(malformed=1, forged=1)


def test_more_than_anybody_reads_ends_it() -> None:
    end = RelayedConnection(lambda frame: True, None, Counter(), connects=True)
    for _ in range(MOST_WAITING):
        end.put(b"a")
    assert not end.broken
    end.put(b"a")
    assert end.broken


def test_an_end_that_is_alone_is_broken() -> None:
    middle = Middle(None)
    middle.there = False
    middle.ends[0].write(b"a")
    middle.ends[0].write(b"b")
    assert middle.ends[0].broken
    assert middle.sent[0] == [b"a"]
