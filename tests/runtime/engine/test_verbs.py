"""Engines over RDMA: the same plans, the same losses, the same promises as by UDP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lossycoll.plan import hierarchical
from lossycoll.runtime.keys.secret import Secret
from tests.support import fake_rdma
from tests.support.fake_rdma import StrangersQueuePair, VerbsNetwork
from tests.support.oracle_cases import CASES, PAYLOAD, lossy_cases
from tests.support.oracle_checks import check
from tests.support.relay import GROUP, SESSION, Packet, assert_sums
from tests.support.waiting import until

LOSSES = ("", "loss=0.1,burst=3,seed=9", "loss=0.1,dup=0.05,reorder=0.1,seed=11")
SECRET = Secret.of(b"a secret of tests over RDMA")


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    yield
    fake_rdma.drop_library()


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("world", [2, 5])
def test_engine_equals_reference(world: int, loss: str, secret: Secret | None) -> None:
    """With and without repair, in packets of a few elements."""
    dropped = 0
    before = fake_rdma.library_sent()
    with VerbsNetwork(world, PAYLOAD, secret, inject=loss, seed=11) as network:
        for number, case in enumerate(lossy_cases(world)):
            for count in (1, 2000):
                dtype = "f32" if case.sums else "bytes"
                dropped += check(network, case, count, dtype, loss, repair=number % 2)
        for stats in (engine.stats() for engine in network.engines):
            assert stats.malformed == stats.foreign == stats.forged == stats.socket_overflow == 0
            assert fake_rdma.library_sent() - before > stats.packets_sent
    assert (dropped > 0) == bool(loss)


def test_reliable_calls_with_parity_and_repair() -> None:
    loss = "loss=0.3,burst=4,seed=4"
    with VerbsNetwork(3, PAYLOAD, inject=loss) as network:
        dropped = sum(
            check(network, case, 2000, "f32" if case.sums else "bytes", loss, reliable=True)
            for case in CASES
        )
    assert dropped > 0


def test_large_packets_and_many() -> None:
    with VerbsNetwork(4) as network:
        assert_sums(network, 300_000, 6, reliable=True)
        assert_sums(network, 300_000, 6)
        for stats in (engine.stats() for engine in network.engines):
            assert stats.packets_missing == stats.packets_resent == stats.socket_overflow == 0


def throw(network: VerbsNetwork, datagram: bytes, **source: Any) -> None:
    """Five times at the first rank, amid traffic that stays right."""
    assert_sums(network, 3000, 2)
    with StrangersQueuePair() as stranger:
        for _ in range(5):
            stranger.throw(network.ports[0].address, datagram, **source)
    assert_sums(network, 3000, 2)


def assert_counted(network: VerbsNetwork, name: str, datagram: bytes, **source: Any) -> None:
    before = getattr(network.engines[0].stats(), name)
    throw(network, datagram, **source)
    until(
        lambda: getattr(network.engines[0].stats(), name) >= before + 5,
        f"five datagrams counted as {name}",
    )


def test_strangers_are_counted_and_never_believed() -> None:
    with VerbsNetwork(2, 256) as network:
        peer = network.ports[1].address
        packet = Packet(session=SESSION, group=GROUP, sender=1, receiver=0).bytes()
        # Of another queue pair, or of another address, though all else is right.
        assert_counted(network, "foreign", packet, queue_pair=peer.queue_pair ^ 1, gid=peer.gid)
        for gid in (f"{peer.gid[:-2]}09", "fe80" + "00" * 13 + "01"):
            assert_counted(network, "foreign", packet, queue_pair=peer.queue_pair, gid=gid)
        # What the peer itself never sends.
        for nonsense in (b"x", bytes(47), bytes(300), packet[:-1], packet + b"x" * 3000):
            assert_counted(network, "malformed", nonsense, queue_pair=peer.queue_pair, gid=peer.gid)
        # Without the key the device drops it: nothing is counted.
        before = network.engines[0].stats()
        throw(network, packet, queue_pair=9, gid=peer.gid, key=peer.key ^ 1)
        after = network.engines[0].stats()
        assert (after.foreign, after.malformed) == (before.foreign, before.malformed)


def test_a_device_that_drops_is_told_of() -> None:
    """Loss that is real: nothing hangs, reliable calls are exact, and what is missing is said."""
    with VerbsNetwork(2, 256) as network, fake_rdma.losing(0.2):
        data = [np.full(20_000, 2.0**rank, np.float32) for rank in range(2)]
        plans = [hierarchical.all_reduce(2, rank, 20_000, 64) for rank in range(2)]
        ended = network.run(plans, data, data, "f32")
        assert all(e.code == 0 for e in ended)
        assert sum(e.report.packets_missing for e in ended) > 0, "the fault did not happen"
        for out in data:
            assert set(np.unique(out)) <= {1.0, 1.5, 2.0}
        assert_sums(network, 3000, 3, reliable=True)
