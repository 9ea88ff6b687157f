"""Sealed engines with somebody in the middle, who sees, changes, repeats and invents datagrams.

He has no key, but knows all else: addresses, session, filter, numbers. What he does may cost
packets, as loss does, and nothing more.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from lossycoll._native import lib

from lossycoll.errors import ClosedError, LossyError
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.failures import Code
from lossycoll.runtime.engine.reports import EngineStats
from lossycoll.runtime.keys import aead
from lossycoll.runtime.keys.secret import KEY_BYTES, transcript
from tests.oracle.codec import Array
from tests.support.network import Network
from tests.support.relay import (
    HEADER,
    PAYLOAD,
    PER_PACKET,
    Faults,
    RelayedNetwork,
    all_reduce,
    assert_sums,
    figures,
)
from tests.support.relay import Packet as PlainPacket
from tests.support.sealed import SECRET, SealedNetwork, SealedRelayedNetwork
from tests.support.waiting import until

TAG = aead.TAG_BYTES
SOL_UDP, UDP_SEGMENT = 17, 103
WAYS = [(cipher, seal) for cipher in aead.CIPHERS for seal in ("encrypt", "authenticate")]


def refused(stats: EngineStats) -> int:
    """Datagrams that weren't believed."""
    return stats.malformed + stats.foreign + stats.forged + stats.replayed


@pytest.mark.parametrize(("cipher", "seal"), WAYS)
def test_sums_are_exact_whatever_seals(cipher: str, seal: str) -> None:
    with SealedNetwork(3, PAYLOAD, cipher=cipher, seal=seal) as network:
        assert_sums(network, 5000, 4, reliable=True)
        for rank in range(3):
            stats = network.engines[rank].stats()
            assert refused(stats) == 0
            assert stats.bytes_sent >= stats.packets_sent * (HEADER.size + TAG)


def test_all_fall_backs_seal_as_well() -> None:
    for disable in ("gso", "mmsg", "gso,mmsg,gather", "simd,gro"):
        with SealedNetwork(2, PAYLOAD, disable=disable) as network:
            assert_sums(network, 5000, 2, reliable=True)
            assert refused(network.engines[0].stats()) == 0, disable


def test_what_a_network_does_costs_packets_and_changes_nothing() -> None:
    faults = Faults(drop=0.05, dup=0.1, reorder=0.1, damage=0.05)
    with SealedRelayedNetwork(3, faults) as network:
        assert_sums(network, 5000, 6, reliable=True)
        passed = network.relay.passed
        assert min(passed.damaged, passed.doubled, passed.delayed, passed.dropped_data) > 10
        found = [engine.stats() for engine in network.engines]
        assert sum(stats.replayed for stats in found) > 10
        assert sum(stats.forged for stats in found) > 5
        assert sum(map(refused, found)) > passed.damaged


def test_a_lossy_sum_is_of_whole_contributions_when_packets_are_changed() -> None:
    with SealedRelayedNetwork(2, Faults(damage=0.3), deadline_min=0.3, deadline_max=5.0) as network:
        count = 40 * PER_PACKET
        for op in range(3):
            plans = all_reduce(2, count, 2 * op + 1)
            data = [np.full(count, 1.0 + rank, np.float32) for rank in range(2)]
            ended = network.run(plans, data, data, "f32", 1.0)
            assert [one.code for one in ended] == [Code.OK] * 2
            for array in data:
                assert set(np.unique(array)) <= {1.0, 1.5, 2.0, 3.0}
        assert network.relay.passed.damaged > 20


def mutations(rng: random.Random, datagram: bytes) -> list[bytes]:
    """A datagram as it was, and changed in each way that somebody without a key can."""

    def with_byte(at: int, value: int) -> bytes:
        return datagram[:at] + bytes([datagram[at] ^ value]) + datagram[at + 1 :]

    return [
        datagram,
        with_byte(8, 1 + rng.randrange(255)),  # the number
        with_byte(15, 1),
        with_byte(6, 1),  # the epoch
        with_byte(HEADER.size + rng.randrange(TAG), 1 + rng.randrange(255)),
        with_byte(rng.randrange(16, HEADER.size), 1 + rng.randrange(255)),
        with_byte(rng.randrange(len(datagram)), 1 + rng.randrange(255)),
        datagram[: rng.randrange(len(datagram))],
        datagram + bytes(1 + rng.randrange(40)),
        datagram[: HEADER.size + TAG] + rng.randbytes(len(datagram) - HEADER.size - TAG),
        PlainPacket(payload=rng.randbytes(64), sender=datagram[30], receiver=datagram[32]).bytes(),
    ]


def while_attacked(network: RelayedNetwork, attack: Callable[[], None]) -> None:
    """All-reduces that must be exact, while ``attack`` is called again and again."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            attack()
            time.sleep(0.0005)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert_sums(network, 5000, 8, reliable=True)
    finally:
        stop.set()
        thread.join()
    assert_sums(network, 5000, 2, reliable=True)


def test_somebody_in_the_middle_changes_no_result() -> None:
    with SealedRelayedNetwork(2, Faults()) as network:
        rng, relay = random.Random(3), network.relay
        thrown = [0]

        def attack() -> None:
            captured = relay.passed.captured
            if not captured:
                return
            receiver, datagram = captured[rng.randrange(len(captured))]
            for bad in mutations(rng, datagram):
                relay.send(1 - receiver, receiver, bad)  # from the sender's own address
                relay.send(receiver, 1 - receiver, bad)  # and back to whoever sent it
                thrown[0] += 2

        def least(stats: EngineStats) -> int:
            return min(stats.malformed, stats.foreign, stats.forged, stats.replayed)

        # Which check meets a datagram first hangs on what was captured by then, so what is
        # thrown is not counted, but what was refused, for each of the reasons.
        for _ in range(100):
            while_attacked(network, attack)
            found = [engine.stats() for engine in network.engines]
            if thrown[0] > 500 and min(map(least, found)) > 10:
                break
        for stats in found:
            assert least(stats) > 10
            assert stats.stale == stats.repeated == 0


def test_packets_of_an_earlier_meeting_are_not_believed() -> None:
    """The same secret, session, group, operations and filter, and so the same names."""
    with SealedRelayedNetwork(2, Faults(), meeting="before") as network:
        assert_sums(network, 5000, 3, reliable=True)
        before = list(network.relay.passed.captured)
    assert len(before) > 50
    with SealedRelayedNetwork(2, Faults()) as network:
        wanted = SECRET.filter("a meeting").to_bytes(2, "little")

        def attack() -> None:
            for receiver, datagram in before[:40]:
                old = datagram[:4] + wanted + datagram[6:]
                network.relay.send(1 - receiver, receiver, old)
                time.sleep(0.0002)

        attack()  # all of these numbers are new
        for rank in range(2):
            of_rank = sum(receiver == rank for receiver, _ in before[:40])
            stats = figures(network, rank, lambda s, n=of_rank: s.forged >= n)  # type: ignore[misc]
            assert stats.forged == of_rank > 0
            assert stats.control_received == 0
        while_attacked(network, attack)
        assert all(engine.stats().foreign == 0 for engine in network.engines)


def test_a_rank_that_starts_again_is_not_believed_by_its_old_packets() -> None:
    """All is as it was, but for its own nonce."""
    with SealedRelayedNetwork(2, Faults(), meeting=transcript("s", ["0", "1"])) as network:
        assert_sums(network, 5000, 3, reliable=True)
        old = [datagram for receiver, datagram in network.relay.passed.captured if receiver == 0]
    again = transcript("s", ["0", "1 again"])
    wanted = SECRET.filter(again).to_bytes(2, "little")
    with SealedRelayedNetwork(2, Faults(), meeting=again) as network:
        for datagram in old[:40]:
            network.relay.send(1, 0, datagram[:4] + wanted + datagram[6:])
        stats = figures(network, 0, lambda s: s.forged >= 40)
        assert (stats.replayed, stats.forged) == (0, 40)
        assert_sums(network, 5000, 1, reliable=True)


def test_what_came_before_is_not_taken_again() -> None:
    with SealedRelayedNetwork(2, Faults()) as network:
        assert_sums(network, 5000, 1, reliable=True)
        old = [datagram for receiver, datagram in network.relay.passed.captured if receiver == 0]
        relay = network.relay
        for datagram in old:
            relay.send(1, 0, datagram)
        stats = figures(network, 0, lambda s: s.replayed >= len(old))
        assert (stats.replayed, stats.forged) == (len(old), 0)
        assert_sums(network, 5000, 1, reliable=True)


def planted(network: RelayedNetwork) -> bool:
    """Whether what a rank contributes can be read by whoever sees its datagrams."""
    pattern = np.frombuffer(b"planted by a test of seals......", np.float32)
    count = 20 * PER_PACKET
    data = [np.resize(pattern, count).copy() for _ in range(2)]
    ended = network.run(all_reduce(2, count, 1), data, data, "f32", 2.0, reliable=True)
    assert [one.code for one in ended] == [Code.OK] * 2
    assert network.relay.passed.data > 10
    return any(b"planted by a test" in datagram for _, datagram in network.relay.passed.captured)


def test_nothing_can_be_read_on_the_wire() -> None:
    with RelayedNetwork(2, Faults()) as network:
        assert planted(network)
    with SealedRelayedNetwork(2, Faults(), seal="authenticate") as sealed:
        assert planted(sealed)
    with SealedRelayedNetwork(2, Faults()) as sealed:
        assert not planted(sealed)


def test_keys_change_a_hundred_times_under_load() -> None:
    with SealedRelayedNetwork(2, Faults()) as network:
        changes = [0]

        def change() -> None:
            network.hosts[changes[0] % 2].rekey()
            changes[0] += 1
            time.sleep(0.0045)

        while changes[0] < 100:
            while_attacked(network, change)
        assert len(network.relay.passed.epochs) > 10
        for engine in network.engines:
            stats = engine.stats()
            assert refused(stats) == stats.packets_missing == stats.packets_resent == 0


def test_keys_change_by_age() -> None:
    with SealedRelayedNetwork(2, Faults(), rekey=0.01) as network:
        until(
            lambda: (
                assert_sums(network, 500, 1, reliable=True) and len(network.relay.passed.epochs) > 5
            )
        )
        assert refused(network.engines[0].stats()) == 0


def test_a_bad_segment_costs_itself_alone() -> None:
    """The kernel may hand over many datagrams as one: of each run that is sent here one is bad."""
    with SealedRelayedNetwork(2, Faults(held=(0, 1))) as network:
        relay, rows = network.relay, 40 * PER_PACKET
        results: list[object] = []
        thread = threading.Thread(
            target=lambda: results.append(assert_sums(network, rows, 1, reliable=True))
        )
        thread.start()

        def full() -> list[bytes]:
            longest = max((len(data) for _, _, data in relay.kept), default=0)
            return [data for _, _, data in list(relay.kept) if len(data) == longest > PAYLOAD]

        until(lambda: len(full()) >= 16)
        segments = full()[:16]
        size = len(segments[0])
        for begin in (0, 8):
            run = bytearray(b"".join(segments[begin : begin + 8]))
            run[3 * size + size // 2] ^= 1
            segment = (SOL_UDP, UDP_SEGMENT, size.to_bytes(2, "little"))
            sent = relay.sockets[0].sendmsg([run], [segment], 0, relay.real[1])
            assert sent == len(run)
        stats = figures(network, 1, lambda s: s.forged >= 2)
        assert (stats.forged, stats.replayed) == (2, 0)
        relay.faults.held = None  # now they come by themselves: all but two are known
        thread.join()
        assert len(results) == 1
        stats = figures(network, 1, lambda s: s.replayed >= 14)
        assert (stats.forged, stats.replayed) == (2, 14)


def test_a_forked_child_seals_nothing_under_its_parents_numbers() -> None:
    """Not even where it asks the engine's library itself."""
    with SealedRelayedNetwork(2, Faults()) as network:
        engine = network.engines[0]
        gets = [np.zeros(20_000, np.float32) for _ in range(4)]
        tickets = [post(engine, one, 1, receive=True) for one in gets]
        time.sleep(0.1)
        child = os.fork()
        if child == 0:
            refused = 0
            for ticket in tickets:
                try:
                    engine.wait(ticket, 0.1)
                except ClosedError:
                    refused += 1
                lib.lc_group_wait(engine._handle, ticket, 10**8)
            os._exit(refused)
        time.sleep(0.05)
        for k in range(len(gets)):
            sent = np.full(20_000, 1.0 + k, np.float32)
            ticket = post(network.engines[1], sent, 0, receive=False)
            until(lambda t=ticket: network.engines[1].wait(t, 0.1) == Code.OK)  # type: ignore[misc]
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(gets)
        for k, ticket in enumerate(tickets):
            until(lambda t=ticket: engine.wait(t, 0.1) == Code.OK)  # type: ignore[misc]
            assert (gets[k] == 1.0 + k).all()
        seen: dict[tuple[int, bytes], bytes] = {}
        for receiver, datagram in network.relay.passed.captured:
            assert seen.setdefault((receiver, datagram[6:16]), datagram) == datagram


def post(engine: EngineGroup, data: Array, peer: int, *, receive: bool) -> int:
    return engine.post(
        Ticket(),
        data.ctypes.data,
        30.0,
        elements=len(data),
        element_bytes=4,
        tag=1,
        peer=peer,
        receive=receive,
    )


@dataclass
class Ticket:
    ticket: int = 0


class HalfSealed(Network):
    """Rank 0 seals, rank 1 doesn't."""

    def start(self, addresses: list[tuple[str, int]]) -> None:
        """As of all networks."""
        self.hosts[0].seal(SECRET.path_secrets("a meeting", 0, self.world), 7)
        assert [host.is_sealed for host in self.hosts] == [True, False]
        super().start(addresses)


def test_plain_and_sealed_engines_do_not_hear_each_other() -> None:
    with HalfSealed(2, PAYLOAD) as network:
        data = [np.ones(1000, np.float32) for _ in range(2)]
        ended = network.run(all_reduce(2, 1000, 1), data, data, "f32", 1.0, timeout=1.0)
        assert [one.code for one in ended] == [Code.TIMEOUT] * 2
        for engine in network.engines:
            assert engine.stats().malformed > 0
            assert engine.stats().control_received == 0


def test_a_host_that_runs_is_not_sealed_any_more() -> None:
    with Network(2) as network, pytest.raises(LossyError, match="refused an argument"):
        network.hosts[0].seal(bytes(2 * 2 * KEY_BYTES), 7)
