"""Each thing that one datagram of somebody who knows the session can do to an engine that doesn't
seal, one by one: to one that does, none does anything."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import pytest

from tests.support.network import GROUP, Network
from tests.support.relay import (
    ACK,
    CONTROL,
    DATA,
    DONE,
    FIN,
    HEADER,
    PER_PACKET,
    PROBE,
    READY,
    WANT,
    Faults,
    Packet,
    RelayedNetwork,
    assert_sums,
    crc32c,
    figures,
)
from tests.support.sealed import SECRET, SealedRelayedNetwork

MISMATCH, ASK, WAIT, LOST, MESSAGE, MAIL, PARITY = 8, 9, 10, 11, 12, 13, 3
FAR = 2**63
TIMES = 20
SEALED, TAG = 0x80, 16


def record(
    kind: int, op: int, slot: int = 0, a: int = 0, b: int = 0, c: int = 0, d: int = 0
) -> bytes:
    return struct.pack("<BBHIIIQQ", kind, 0, slot, op, a, b, c, d)


def control(*records: bytes, group: int = GROUP) -> bytes:
    return Packet(type=CONTROL, group=group, payload=b"".join(records), count=len(records)).bytes()


def data(op: int, **fields: int) -> bytes:
    return Packet(
        op=op, payload=struct.pack(f"<{PER_PACKET}f", *[1e30] * PER_PACKET), **fields
    ).bytes()


ATTACKS: dict[str, Callable[[int], bytes]] = {
    # ends the group
    "another call": lambda op: control(record(MISMATCH, op, c=1, d=5)),
    "another signature": lambda op: control(record(READY, op, c=FAR)),
    "another signature, asked": lambda op: control(record(WANT, op, c=FAR)),
    "one planted for later": lambda op: control(record(READY, op + 200, c=FAR)),
    # injects a gradient
    "data": data,
    "data sent ahead": lambda op: data(op, type=DATA | 0x80),
    "a count that can't be": lambda op: data(op, count=2),
    "parity": lambda op: data(op, type=PARITY, code=0x41),
    # erases contributions
    "an end": lambda op: control(record(FIN, op)),
    "a loss that never was": lambda op: control(record(LOST, op, b=64, c=FAR)),
    # makes a call wait
    "done, all of it": lambda op: control(record(DONE, op, slot=0xFFFF)),
    "wait": lambda op: control(record(WAIT, op, slot=0xFFFF)),
    "a question": lambda op: control(record(ASK, op)),
    # a false window, number and round trip
    "an acknowledgement": lambda op: control(record(ACK, 0, a=2**31, b=1, c=FAR, d=2**40), group=0),
    "a probe": lambda op: control(record(PROBE, 0, a=2**31), group=0),
    # messages
    "a message": lambda op: control(record(MESSAGE, op, slot=0xFFFE, a=3, b=1 | 1 << 16, d=64)),
    "mail": lambda op: control(record(MAIL, 2**20, slot=0xFFFE, a=1, c=2**40)),
}


def thrown(name: str, op: int, receiver: int) -> bytes:
    """The attack on ``receiver``, as if the other rank had sent it."""
    bad = bytearray(ATTACKS[name](op))
    bad[30], bad[32] = 1 - receiver, receiver
    blank = bytes(bad[:4]) + bytes(4) + bytes(bad[8 : HEADER.size])
    return bytes(bad[:4]) + crc32c(blank).to_bytes(4, "little") + bytes(bad[8:])


def sealed_by_a_stranger(plain: bytes, number: int) -> bytes:
    """The same in the form of a sealed datagram, whose tag is but a guess."""
    wanted = SECRET.filter("a meeting").to_bytes(2, "little")
    header = plain[:2] + bytes([plain[2] | SEALED, plain[3]]) + wanted + bytes(2)
    tag = bytes(number >> k & 255 for k in range(TAG))
    return header + number.to_bytes(8, "little") + plain[16 : HEADER.size] + tag + plain[48:]


@pytest.mark.parametrize("name", ATTACKS)
def test_without_a_seal_it_would_be_looked_at(name: str) -> None:
    with RelayedNetwork(2, Faults()) as network:
        assert_sums(network, 600, 1, reliable=True)
        network.relay.send(1, 0, thrown(name, network.op, 0))
        network.relay.send(1, 0, b"the mark behind it")
        stats = figures(network, 0, lambda s: s.malformed >= 1)
        assert (stats.malformed, stats.foreign) == (1, 0), "the attack isn't one"


def state(network: Network) -> list[tuple[int, int, int]]:
    """What an attack might set: of each rank, the other's window, and sums of what it has lost."""
    found = []
    for rank, engine in enumerate(network.engines):
        peer = engine.peer_stats(1 - rank)
        stats = engine.stats()
        found.append((peer.window, stats.packets_missing, stats.repeated + stats.stale))
    return found


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_happens(name: str) -> None:
    with SealedRelayedNetwork(2, Faults()) as network:
        assert_sums(network, 3000, 2, reliable=True)
        before = state(network)
        began = time.monotonic()
        for turn in range(TIMES):
            for receiver in range(2):
                bad = thrown(name, network.op + turn % 4, receiver)
                network.relay.send(1 - receiver, receiver, bad)
                bad = sealed_by_a_stranger(bad, 5000 + turn)
                network.relay.send(1 - receiver, receiver, bad)
            assert_sums(network, 600, 1, reliable=True)
        took = time.monotonic() - began
        for rank in range(2):
            stats = figures(network, rank, lambda s: min(s.malformed, s.forged) >= TIMES)
            assert (stats.malformed, stats.forged) == (TIMES, TIMES), "the fault did not happen"
            assert (stats.foreign, stats.replayed) == (0, 0)
            assert network.engines[rank].peer_stats(1 - rank).rtt_ns < 1e9 * took
        after = state(network)
        assert [one[1:] for one in after] == [one[1:] for one in before]
