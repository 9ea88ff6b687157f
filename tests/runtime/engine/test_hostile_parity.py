"""Parity that is not what it says: from a peer's own address, as only a network can send it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from lossycoll.plan import hierarchical
from lossycoll.plan.sets import Code
from tests.support.relay import (
    CONTROL,
    FIN,
    PAYLOAD,
    PER_PACKET,
    Faults,
    Packet,
    RelayedNetwork,
    figures,
)
from tests.support.waiting import until

PARITY = 3
COUNT = 1000  # of two ranks: streams of 8 packets, the last of 52 elements
PACKETS, CODE, SETS = 8, Code(4, 1), 2
VALUE = np.full(PER_PACKET, 2.0, np.float32).tobytes()


def data(packet: int, **changes: object) -> bytes:
    whole = VALUE if packet < PACKETS - 1 else VALUE[: 52 * 4]
    made = Packet(payload=whole, packet=packet, code=CODE.number)
    return replace(made, **changes).bytes()  # type: ignore[arg-type]


def right(number: int, **changes: object) -> bytes:
    """The parity of a set of four packets alike: nothing, of four counts of 1."""
    made = Packet(bytes(PAYLOAD), type=PARITY, packet=PACKETS + number, count=0, code=CODE.number)
    return replace(made, **changes).bytes()  # type: ignore[arg-type]


def malformed() -> Iterator[bytes]:
    for packet in (0, PACKETS - 1, PACKETS + SETS, 1000, 2**30, 2**31, 2**32 - 1):
        yield right(0, packet=packet)
    for code in (0, 4095, *(CODE.number ^ 1 << bit for bit in range(12))):
        yield right(0, code=code)
        yield data(0, code=code)
    for dtype in range(1, 8):
        yield right(0, format=dtype)
    for size in (0, 4, PAYLOAD - 4, PAYLOAD + 8):
        yield right(0, payload=bytes(size))
    for number in (1, 255):
        yield right(0, round=number)
        yield data(0, first=False, format=16, round=number)
    yield data(0, first=False, round=0)
    for slot in (77, 65535):
        yield right(0, slot=slot)
    for word in (CODE.number ^ 1, 1 << 12, 1 << 16, 2**64 - 1):
        yield fin(word)


def fin(word: int) -> bytes:
    """The end of the stream, with this code."""
    record = struct.pack("<BBHIIIQQ", FIN, 0, 0, 0, PACKETS + SETS, 0, 0, word)
    return Packet(record, type=CONTROL, count=1).bytes()


def test_parity_that_makes_no_sense_is_malformed() -> None:
    with RelayedNetwork(2, Faults()) as network:
        plans = [hierarchical.all_reduce(2, r, COUNT, PER_PACKET) for r in range(2)]
        values = [np.full(COUNT, float(r + 1), np.float32) for r in range(2)]
        ticket = network.submit(0, plans[0], (values[0], values[0]), "f32", 2.0, code=CODE)
        until(lambda: network.relay.passed.control > 0, "rank 0 to ask for rank 1")
        sent = list(malformed())
        for datagram in sent:
            network.relay.send(1, 0, datagram)
        stats = figures(network, 0, lambda s: s.malformed >= len(sent))
        assert (stats.malformed, stats.stale, stats.parity_received) == (len(sent), 0, 0)
        other = network.submit(1, plans[1], (values[1], values[1]), "f32", 2.0, code=CODE)
        for rank, mine in ((0, ticket), (1, other)):
            ended = network.end(rank, mine, 10)
            assert (ended.code, ended.report.packets_missing) == (0, 0)
            assert (values[rank] == 3.0).all()


def test_parity_where_none_was_asked_for_is_malformed() -> None:
    with RelayedNetwork(2, Faults()) as network:
        plans = [hierarchical.all_reduce(2, r, COUNT, PER_PACKET) for r in range(2)]
        values = [np.full(COUNT, float(r + 1), np.float32) for r in range(2)]
        ticket = network.submit(0, plans[0], (values[0], values[0]), "f32", 2.0)
        until(lambda: network.relay.passed.control > 0, "rank 0 to ask for rank 1")
        for datagram in (data(0), right(0), right(1)):
            network.relay.send(1, 0, datagram)
        assert figures(network, 0, lambda s: s.malformed >= 3).malformed == 3
        other = network.submit(1, plans[1], (values[1], values[1]), "f32", 2.0)
        for rank, mine in ((0, ticket), (1, other)):
            assert network.end(rank, mine, 10).report.packets_missing == 0
            assert (values[rank] == 3.0).all()


@pytest.mark.parametrize(("count", "believed"), [(0, True), (1, False), (8, False), (65535, False)])
def test_a_count_that_cannot_be_is_not_believed(count: int, believed: bool) -> None:
    """Three packets of a set and its parity come; with a wrong count the fourth waits for the
    real one, for nothing else can tell what it was."""
    with RelayedNetwork(2, Faults()) as network:
        plans = [hierarchical.all_reduce(2, r, COUNT, PER_PACKET) for r in range(2)]
        values = [np.full(COUNT, float(r + 1), np.float32) for r in range(2)]
        ticket = network.submit(0, plans[0], (values[0], values[0]), "f32", 2.0, code=CODE)
        until(lambda: network.relay.passed.control > 0, "rank 0 to ask for rank 1")
        for packet in (0, 2, 4):
            network.relay.send(1, 0, data(packet))
        for _ in range(2):  # once is enough
            network.relay.send(1, 0, right(0, count=count))
        stats = figures(network, 0, lambda s: s.repeated >= 1)
        assert (stats.repeated, stats.malformed) == (1, 0)
        other = network.submit(1, plans[1], (values[1], values[1]), "f32", 2.0, code=CODE)
        for rank, mine in ((0, ticket), (1, other)):
            ended = network.end(rank, mine, 10)
            assert (ended.code, ended.report.packets_missing) == (0, 0)
            assert ended.report.packets_recovered == (believed and rank == 0)
            assert (values[rank] == 3.0).all()


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("repair", [0, 1])
def test_on_a_bad_network_parity_brings_back_what_was_lost(repair: int, auto: bool) -> None:
    """Control and parity are lost, doubled and out of order, too; no packet is ever a mixture."""
    faults = Faults(drop=0.1, dup=0.1, reorder=0.1, delay=0.02, seed=19)
    with RelayedNetwork(2, faults) as network:
        recovered = 0
        for op in range(12):
            plans = [hierarchical.all_reduce(2, r, 6000, PER_PACKET) for r in range(2)]
            values = [np.full(6000, float(1 << r), np.float32) for r in range(2)]
            parity = {"most_parity": 16} if auto else {"code": CODE}
            how = {"repair": repair, **parity}
            for ended in network.run(plans, values, values, "f32", 1.0, **how):
                assert ended.code == 0, ended.failure
                recovered += ended.report.packets_recovered
            for array in values:
                assert set(np.unique(array)) <= {1.0, 1.5, 2.0}, op
        stats = [engine.stats() for engine in network.engines]
        assert network.relay.passed.dropped_data > 20
        assert sum(s.malformed for s in stats) == 0
    assert recovered > 10
