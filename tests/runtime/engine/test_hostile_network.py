"""A hostile network: datagrams that are not ours, not whole, not new, or not in order.

Strangers throw datagrams at a running pair of engines, and a relay between engines, which owns the
ports that they know each other by, drops, doubles, delays and reorders what they really send:
control as well as data.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from lossycoll.plan import Finish, copies, hierarchical, reduce_scatter
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions
from tests.oracle.codec import Array
from tests.support.network import GROUP, Network
from tests.support.relay import (
    CONTROL,
    DATA,
    FIN,
    NACK,
    PAYLOAD,
    PER_PACKET,
    PROBE,
    READY,
    SESSION,
    Faults,
    Packet,
    Passed,
    RelayedNetwork,
    all_reduce,
    assert_sums,
    figures,
)
from tests.support.sampling import pairs
from tests.support.waiting import until

# ---- helpers ----


def assert_means(data: list[Array], count: int) -> None:
    """Rank r gave 2**r everywhere: each packet is the mean of one subset of the ranks."""
    world = len(data)
    subsets = [
        np.float32(sum(1 << r for r in range(world) if bits >> r & 1) / bits.bit_count())
        for bits in range(1, 1 << world)
    ]
    for array in data:
        packets = [array[i : i + PER_PACKET] for i in range(0, count, PER_PACKET)]
        for packet in packets:
            assert (packet == packet[0]).all(), "a packet is whole or not there"
            assert np.isclose(packet[0], subsets, rtol=1e-6).any(), packet[0]


class Stranger:
    """A socket of nobody's."""

    def __init__(self, network: Network) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.ports = [engine.link().port for engine in network.engines]

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def throw(self, rank: int, datagrams: Iterator[bytes] | list[bytes]) -> int:
        """At a pace that the receiver's buffer can take."""
        sent = 0
        for datagram in datagrams:
            self.socket.sendto(datagram, ("127.0.0.1", self.ports[rank]))
            sent += 1
            if sent % 32 == 0:
                time.sleep(0.002)
        return sent


def amid_traffic(network: Network, throw: Callable[[], int]) -> int:
    """Throws while operations run, and checks these. Returns how much was thrown."""
    thrown: list[int] = []
    thread = threading.Thread(target=lambda: thrown.append(throw()))
    thread.start()
    while thread.is_alive():
        assert_sums(network, 3000, 4)
    thread.join()
    assert_sums(network, 3000, 2)
    return thrown[0]


# ---- strangers ----


def random_datagrams(rng: random.Random) -> Iterator[bytes]:
    for _ in range(600):
        yield rng.randbytes(rng.choice((0, 1, 16, 47, 48, 49, 80, 304, 1456, 9000, 60000)))


def truncated() -> Iterator[bytes]:
    whole = Packet().bytes()
    yield from (whole[:n] for n in range(len(whole)))


def bad_fields() -> Iterator[bytes]:
    """Each wrong in one field, in ways that no address excuses."""
    good = Packet()
    for magic in (0, 0x434C, 0x4C42):
        yield replace(good, magic=magic).bytes()
    for version in (0, 1, 7, 9, 255):
        yield replace(good, version=version).bytes()
    for kind in (0, 4, DATA | 9 << 3, DATA | 15 << 3, 255):
        yield replace(good, type=kind).bytes()
    for length in (0, 1, PAYLOAD - 1, PAYLOAD + 1, 65535):
        yield replace(good, length=length).bytes()
    yield replace(good, count=0).bytes()
    yield replace(good, group=0).bytes()
    for format in (5, 255):
        yield replace(good, format=format).bytes()
    for crc in (0, 0xFFFFFFFF):
        yield replace(good, crc=crc).bytes()
    bits = bytearray(good.bytes())
    for at in range(48):
        damaged = bits.copy()
        damaged[at] ^= 0x10
        yield bytes(damaged)
    for records, count in ((32, 2), (33, 1), (64, 1), (0, 1), (31, 1)):
        yield replace(good, type=CONTROL, payload=bytes(records), count=count).bytes()
    whole = Packet(type=CONTROL, payload=struct.pack("<BBHIIIQQ", READY, 0, 0, 3, 0, 0, 0, 0))
    for at in range(48, 80):
        damaged = bytearray(whole.bytes())
        damaged[at] ^= 0x10
        yield bytes(damaged)


def foreign() -> Iterator[bytes]:
    """Whole, but of another session, group or rank, or from another address."""
    good = Packet()
    for session in (0, SESSION + 1, 2**64 - 1):
        yield replace(good, session=session).bytes()
    for group in (GROUP + 1, 2**32 - 1):
        yield replace(good, group=group).bytes()
    for sender in (0, 2, 65535):
        yield replace(good, sender=sender).bytes()
    for receiver in (1, 2, 65535):
        yield replace(good, receiver=receiver).bytes()
    for op in (0, 1, 2**32 - 1):
        yield replace(good, op=op).bytes()
    for slot in (0, 1, 65535):
        yield replace(good, slot=slot).bytes()
    for kind in (*range(12), 255):
        record = struct.pack("<BBHIIIQQ", kind, 0, 0, 3, 2**31, 2**31, 2**63, 2**63)
        yield replace(good, type=CONTROL, payload=record, count=1).bytes()


def test_random_bytes_are_counted_and_dropped() -> None:
    with Network(2, PAYLOAD) as network, Stranger(network) as stranger:
        rng = random.Random(1)
        sent = amid_traffic(network, lambda: stranger.throw(0, random_datagrams(rng)))
        stats = figures(network, 0, lambda s: s.malformed + s.socket_overflow >= sent)
        assert stats.malformed + stats.socket_overflow == sent
        assert stats.malformed > sent * 0.9
        assert (stats.foreign, stats.packets_missing) == (0, 0)
        assert network.engines[1].stats().malformed == 0


@pytest.mark.parametrize("kind", [truncated, bad_fields])
def test_bad_headers_are_malformed(kind: Callable[[], Iterator[bytes]]) -> None:
    with Network(2, PAYLOAD) as network, Stranger(network) as stranger:
        sent = amid_traffic(network, lambda: stranger.throw(0, kind()))
        stats = figures(network, 0, lambda s: s.malformed >= sent)
        assert (stats.malformed, stats.foreign) == (sent, 0)
        assert stats.packets_missing == stats.socket_overflow == 0


def test_wrong_sessions_and_addresses_are_foreign() -> None:
    with Network(2, PAYLOAD) as network, Stranger(network) as stranger:
        sent = amid_traffic(network, lambda: stranger.throw(0, foreign()))
        stats = figures(network, 0, lambda s: s.foreign >= sent)
        assert (stats.foreign, stats.malformed) == (sent, 0)
        assert stats.packets_missing == stats.socket_overflow == 0


# ---- a peer's own address: what only a network can do to us ----


def out_of_range() -> Iterator[tuple[bytes, str]]:
    """Whole, ours and from the right address, but not of the operation that runs; and its counter.

    Operation 0 of two ranks: rank 0 expects slot 0 or slots of a ring of 1000 elements.
    """
    good = Packet()
    for slot in (77, 65534, 65535):
        yield replace(good, slot=slot).bytes(), "malformed"
    for packet in (16, 1000, 2**31, 2**32 - 1):
        yield replace(good, packet=packet).bytes(), "malformed"
    for format in (1, 2, 3, 4):
        yield replace(good, format=format).bytes(), "malformed"
    for encoding in (1, 2, 3, 8):
        yield replace(good, type=DATA | encoding << 3).bytes(), "malformed"
    for count in (3, 65535):
        yield replace(good, count=count).bytes(), "malformed"
    for size in (0, 4, PAYLOAD - 4, PAYLOAD + 8):
        yield replace(good, payload=bytes(size)).bytes(), "malformed"
    for kind in (0, 14, 255):
        record = struct.pack("<BBHIIIQQ", kind, 0, 0, 0, 0, 0, 0, 0)
        yield replace(good, type=CONTROL, payload=record, count=1).bytes(), "malformed"
    fin = struct.pack("<BBHIIIQQ", FIN, 0, 999, 0, 0, 0, 0, 0)
    yield replace(good, type=CONTROL, payload=fin, count=1).bytes(), "malformed"
    for base, missing in ((1, 1), (63, 1), (0, 2**31), (2**32 - 64, 2**32 - 1)):
        nack = struct.pack("<BBHIIIQQ", NACK, 1, 0, 0, base, missing, 2**64 - 1, 2**64 - 1)
        yield replace(good, type=CONTROL, payload=nack, count=1).bytes(), "stale"
    for op in (1, 255, 256, 2**31, 2**32 - 1):
        yield replace(good, op=op).bytes(), "stale"
    for group in (GROUP + 1, 2**32 - 1):
        yield replace(good, group=group).bytes(), "stale"
    ready = struct.pack("<BBHIIIQQ", READY, 0, 0, 0, 0, 0, 0, 0)
    yield replace(good, type=CONTROL, group=0, payload=ready, count=1).bytes(), "malformed"


def test_fields_out_of_range_from_the_right_address() -> None:
    """The operation waits for rank 1, which is late, while rank 1's address sends nonsense."""
    with RelayedNetwork(2, Faults()) as network:
        count = 1000
        plans = [hierarchical.all_reduce(2, r, count, PER_PACKET) for r in range(2)]
        data = [np.full(count, float(r + 1), np.float32) for r in range(2)]
        ticket = network.submit(0, plans[0], (data[0], data[0]), "f32", 2.0)
        until(lambda: network.relay.passed.control > 0, "rank 0 to ask for rank 1")
        wanted = {"malformed": 0, "stale": 0}
        for datagram, counter in out_of_range():
            network.relay.send(1, 0, datagram)
            wanted[counter] += 1
        stats = figures(network, 0, lambda s: s.malformed >= wanted["malformed"])
        assert {name: getattr(stats, name) for name in wanted} == wanted
        other = network.submit(1, plans[1], (data[1], data[1]), "f32", 2.0)
        for rank, mine in ((0, ticket), (1, other)):
            ended = network.end(rank, mine, 10)
            assert (ended.code, ended.report.packets_missing) == (0, 0)
            assert (data[rank] == 3.0).all()


def test_replayed_datagrams_change_nothing() -> None:
    """All that two engines said, said again: at once, later, and while newer operations run."""
    with RelayedNetwork(2, Faults()) as network:
        assert_sums(network, 3000, 10)
        captured = list(network.relay.passed.captured)
        data_to = [sum(d[3] == DATA and to == r for to, d in captured) for r in range(2)]
        assert min(data_to) > 100

        def throw() -> int:
            for i, (receiver, datagram) in enumerate(captured * 2):
                network.relay.send(1 - receiver, receiver, datagram)
                if i % 16 == 0:
                    time.sleep(0.002)
            return len(captured) * 2

        begin = time.monotonic()
        amid_traffic(network, throw)
        assert time.monotonic() - begin < 30
        for rank in range(2):
            wanted = 2 * data_to[rank]
            stats = figures(network, rank, lambda s, n=wanted: s.stale + s.repeated >= n)
            assert stats.stale + stats.repeated >= wanted
            assert stats.packets_missing == 0
            assert stats.malformed == stats.foreign == 0


TOO_LONG = 0.1
"""Seconds: no round trip here takes so long."""


def test_old_datagrams_do_not_pass_for_a_long_way() -> None:
    """A round trip is measured by what is new: an old packet or answer would make it seconds."""
    with RelayedNetwork(2, Faults()) as network:
        assert_sums(network, 3000, 10)
        captured = list(network.relay.passed.captured)
        time.sleep(5 * TOO_LONG)
        for _ in range(3):
            for i, (receiver, datagram) in enumerate(captured):
                network.relay.send(1 - receiver, receiver, datagram)
                if i % 16 == 0:
                    time.sleep(0.002)
        for rank in range(2):
            wanted = 3 * sum(d[3] == DATA and to == rank for to, d in captured)
            stats = figures(network, rank, lambda s, n=wanted: s.stale + s.repeated >= n)
            assert stats.stale + stats.repeated >= wanted, "not all that is old has come"
            assert network.engines[rank].peer_stats(1 - rank).rtt_ns < TOO_LONG * 1e9
        assert_sums(network, 3000, 4)


def test_a_link_number_from_beyond_does_not_silence_the_link() -> None:
    """A wrong record must not cost more than itself."""
    with RelayedNetwork(2, Faults()) as network:
        assert_sums(network, 3000, 2)
        for far in (10_000, 2**30, 2**31 + 5, 2**32 - 1):
            for kind, a, b in ((PROBE, far, 0), (FIN, 0, far)):
                record = struct.pack("<BBHIIIQQ", kind, 0, 0, 0, a, b, 0, 0)
                packet = Packet(type=CONTROL, payload=record)
                network.relay.send(1, 0, packet.bytes())
            network.relay.send(1, 0, Packet(link_seq=far).bytes())
        for ended in assert_sums(network, 100_000, 4):
            assert ended.report.packets_missing == 0
            assert ended.report.elapsed < 15


def test_damaged_headers_and_records_are_dropped_and_repaired() -> None:
    with RelayedNetwork(2, Faults(damage=0.05, seed=3)) as network:
        assert_sums(network, 6000, 20, reliable=True)
        stats = [figures(network, r, lambda s: s.malformed > 0) for r in range(2)]
        damaged = network.relay.passed.damaged  # last: packets go on passing meanwhile
        assert damaged > 20
        # A damaged length makes two packets of one at times, and both are counted.
        assert 0.8 * damaged <= sum(s.malformed for s in stats) <= 1.1 * damaged


# ---- the protocol on a bad network ----

NETWORKS = {
    "drop 10%": Faults(drop=0.1, seed=11),
    "drop 30%": Faults(drop=0.3, seed=12),
    "double 30%": Faults(dup=0.3, seed=13),
    "reorder 30%": Faults(reorder=0.3, seed=14),
    "reorder 30% by 60 ms": Faults(reorder=0.3, delay=0.06, seed=15),
    "all 10%": Faults(drop=0.1, dup=0.1, reorder=0.1, delay=0.02, seed=16),
    "all 30%": Faults(drop=0.3, dup=0.3, reorder=0.3, delay=0.02, seed=17),
}


def assert_happened(faults: Faults, passed: Passed) -> None:
    assert (passed.dropped_data > 10 and passed.dropped_control > 5) or not faults.drop
    assert passed.doubled > 20 or not faults.dup
    assert passed.delayed > 20 or not faults.reorder


def _in_turn(values: tuple[int, ...]) -> Iterator[Any]:
    """Each with each network; in the short suite a network has one of them."""
    for value, (at, name) in product(values, enumerate(NETWORKS)):
        turn = values[at % len(values)] == value
        yield pytest.param(value, name, marks=() if turn else pytest.mark.long)


@pytest.mark.parametrize(("world", "name"), list(_in_turn((2, 4))))
def test_reliable_is_exact_whatever_the_network_does(world: int, name: str) -> None:
    faults = NETWORKS[name]
    with RelayedNetwork(world, faults) as network:
        begin = time.monotonic()
        ended = assert_sums(network, 12_000, 8, reliable=True)
        took = time.monotonic() - begin
        slowest = max(e.report.elapsed for e in ended)
        print(f"\nreliable {name} world={world}: {took:.2f} s, slowest {slowest:.2f} s")
        assert all(e.report.packets_missing == 0 for e in ended)
        assert_happened(faults, network.relay.passed)
        assert slowest < 15


def test_a_nack_of_many_datagrams_may_lose_some() -> None:
    """1563 packets are named by 13 records, and a control packet here holds 7 of them. Packets that
    come late between two reports must not leave sender and receiver waiting for each other."""
    with RelayedNetwork(2, NETWORKS["all 30%"]) as network:
        for ended in assert_sums(network, 200_000, 2, reliable=True):
            assert ended.report.packets_missing == 0
            assert ended.report.packets_resent > 300
            assert ended.report.elapsed < 30


@pytest.mark.parametrize(("repair", "name"), list(_in_turn((1, 0, 3))))
def test_lossy_ends_soon_with_means_of_subsets(repair: int, name: str) -> None:
    faults, world, count, many = NETWORKS[name], 3, 6000, 12
    with RelayedNetwork(world, faults) as network:
        begin = time.monotonic()
        jobs, tickets = [], []
        for op in range(many):  # several in flight
            plans = all_reduce(world, count, op)
            data = [np.full(count, float(1 << r), np.float32) for r in range(world)]
            jobs.append(data)
            tickets.append(
                [
                    network.submit(r, plans[r], (data[r], data[r]), "f32", repair=repair)
                    for r in range(world)
                ]
            )
        missing = expected = 0
        slowest = 0.0
        for data, ticket in zip(jobs, tickets, strict=True):
            for rank in range(world):
                ended = network.end(rank, ticket[rank], 30)
                assert ended.code == 0, ended.failure
                missing += ended.report.packets_missing
                expected += ended.report.packets_missing + ended.report.packets_received
                slowest = max(slowest, ended.report.elapsed)
            assert_means(data, count)
        took = time.monotonic() - begin
        print(
            f"\nlossy repair={repair} {name}: {took:.2f} s, slowest {slowest:.2f} s, "
            f"missing {missing / expected:.1%}"
        )
        assert_happened(faults, network.relay.passed)
        assert slowest < 15
        if repair == 0 and faults.drop:
            assert missing > 0.5 * faults.drop * expected
        if repair == 3:
            assert missing < (0.01 + faults.drop) * expected


@pytest.mark.parametrize(("repair", "name"), list(pairs([1, 0], [*NETWORKS, "no NACK"])))
def test_both_ends_agree_on_what_was_lost(repair: int, name: str) -> None:
    """Rank r contributes 2**r: a packet's sum says whose contributions are in it, and each sender
    must have learnt just that, on networks that lose what says so as well."""
    faults, world, packets = NETWORKS.get(name, Faults(drop=0.3, seed=18, mute=NACK)), 3, 60
    count, lost = packets * PER_PACKET, 0
    patience = {"deadline_min": 0.5, "deadline_max": 2.0} if faults.mute else {}
    with RelayedNetwork(world, faults, **patience) as network:
        for _ in range(2 if faults.mute else 6):
            plans = [
                reduce_scatter.reduce_scatter(world, r, count, PER_PACKET, finish=Finish.WEIGHTED)
                for r in range(world)
            ]
            parts = [Contributions(plan, 4) for plan in plans]
            data = [np.full(count * world, float(1 << r), np.float32) for r in range(world)]
            sums = [np.zeros(count, np.float32) for _ in range(world)]
            tickets = [
                network.submit(r, plans[r], (data[r], sums[r]), "f32", repair=repair, feedback=True)
                for r in range(world)
            ]
            for r in range(world):
                note = partial(parts[r].note, network.engines[r])
                ended = network.end(r, tickets[r], 30, note)
                assert ended.code == 0, ended.failure
                assert ended.report.elapsed < 15
            for owner in range(world):
                held = sums[owner].reshape(packets, PER_PACKET)
                assert (held == held[:, :1]).all()
                for r in range(world):
                    there = held[:, 0].astype(int) >> r & 1
                    np.testing.assert_array_equal(there == 0, parts[r].lost[owner])
                    lost += int((there == 0).sum())
        assert_happened(faults, network.relay.passed)
        assert (network.relay.passed.muted > 0) == bool(repair and faults.mute)
    assert lost > 0 or not faults.drop


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_needed_comes_whatever_the_network_does(name: str) -> None:
    faults, world, packets = NETWORKS[name], 3, 60
    count = packets * PAYLOAD
    stale = 0
    with RelayedNetwork(world, faults) as network:
        for number in range(1, 7):
            plans = [copies.all_gather(world, r, count, PAYLOAD) for r in range(world)]
            draw = np.random.default_rng(number)
            needed = draw.random((world, world, packets)) < 0.5  # (receiver, owner, packet)
            blocks = [Blocks(plans[r], [count] * world, PAYLOAD, needed[r]) for r in range(world)]
            given = [np.full(count, number, np.uint8) for _ in range(world)]
            held = [np.zeros(count * world, np.uint8) for _ in range(world)]
            tickets = [
                network.submit(
                    r, plans[r], (given[r], held[r]), "bytes", needed=blocks[r].encoded()
                )
                for r in range(world)
            ]
            for r in range(world):
                note = partial(blocks[r].note, network.engines[r])
                ended = network.end(r, tickets[r], 30, note)
                assert ended.code == 0, ended.failure
                assert ended.report.elapsed < 15
                came = held[r].reshape(world, packets, PAYLOAD)
                assert ((came == number).all(-1) == blocks[r].arrived).all()
                assert ((came == 0).all(-1) == ~blocks[r].arrived).all()
                assert blocks[r].arrived[needed[r]].all()
                stale += int((~blocks[r].arrived).sum())
        assert_happened(faults, network.relay.passed)
    assert stale > 0 or not faults.drop
