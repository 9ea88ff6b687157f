"""The in-flight window: what is lost has taken credit, and the credit comes back.

A packet that arrives says how far its sender has come; where none arrives, PROBE and FIN say it.
Credit that is lost for good makes a link slower with every loss, until it stands still.
"""

from __future__ import annotations

import numpy as np

from lossycoll.plan import Plan, data_movement, hierarchical
from tests.support.network import SESSION, Ended, Network
from tests.support.relay import (
    DATA,
    PAYLOAD,
    PER_PACKET,
    Faults,
    Packet,
    RelayedNetwork,
    assert_sums,
    figures,
)
from tests.support.waiting import until

BUFFER = 64 << 10
WINDOW = 256
"""More packets than a peer with such a buffer lets be in flight."""
PACKETS = 4000
"""Of one stream: many windows."""


def mean(network: Network, packets: int) -> list[Ended]:
    """A mean that may lack something, of so many packets to and from each of two ranks."""
    count = 2 * packets * PER_PACKET
    data = [np.full(count, float(rank + 1), np.float32) for rank in range(2)]
    ended = network.run(plans(count), data, data, "f32", timeout=10.0)
    assert [one.code for one in ended] == [0, 0], [one.failure for one in ended]
    return ended


def stands_still(network: RelayedNetwork) -> bool:
    """Whether a rank asks again and again whether anything has come, and no data is sent."""
    passed = network.relay.passed
    data, probes = passed.data, passed.probes
    until(lambda: passed.probes >= probes + 3, "questions")
    return passed.data == data


def plans(count: int) -> list[Plan]:
    return [hierarchical.all_reduce(2, rank, count, PER_PACKET) for rank in range(2)]


def test_credit_comes_back_after_loss() -> None:
    """Whole windows are lost many times over, and what follows is sent."""
    with Network(2, PAYLOAD, inject="loss=0.6,seed=31", socket_buffer=BUFFER) as network:
        for one in mean(network, PACKETS):
            assert one.report.packets_injected > 10 * WINDOW


def test_credit_comes_back_after_an_outage() -> None:
    """All that rank 0 may have under way is lost: nothing that arrives gives it credit again."""
    with RelayedNetwork(2, Faults(), socket_buffer=BUFFER, deadline_min=60, deadline_max=60) as net:
        assert_sums(net, 3000, 4)
        count = 2 * PACKETS * PER_PACKET
        way = [data_movement.gather(2, rank, (count, 0), PER_PACKET, root=1) for rank in range(2)]
        nothing, sent, got = (
            np.zeros(0, np.float32),
            np.ones(count, np.float32),
            np.zeros(count, np.float32),
        )
        net.faults.last = net.relay.passed.data + 1000  # more than is sent ahead
        tickets = [
            net.submit(0, way[0], (sent, nothing), "f32", timeout=10.0),
            net.submit(1, way[1], (nothing, got), "f32", timeout=10.0),
        ]
        net.op += 1
        until(lambda: net.relay.passed.data > net.faults.last, "an outage")
        until(lambda: stands_still(net), "a window that is used up")
        net.faults.last = None
        ended = [net.end(rank, ticket) for rank, ticket in enumerate(tickets)]
        assert [one.code for one in ended] == [0, 0], [one.failure for one in ended]
        missing = ended[1].report.packets_missing
        assert 0 < missing <= WINDOW
        assert np.count_nonzero(got == 0) == missing * PER_PACKET
        assert_sums(net, 3000, 4)


def test_a_wrong_session_is_foreign_even_from_the_right_socket() -> None:
    """What a peer's earlier job left on the way has its address, and all else right."""
    with RelayedNetwork(2, Faults()) as net:
        count = 1000
        values = [np.full(count, float(rank + 1), np.float32) for rank in range(2)]
        first, second = plans(count)
        ticket = net.submit(0, first, (values[0], values[0]), "f32", 2.0)
        until(lambda: net.relay.passed.control > 0, "rank 0 to ask for rank 1")
        wrong = np.full(PER_PACKET, 7.0, np.float32).tobytes()
        for session in (0, SESSION + 1, SESSION ^ 1 << 63):
            for number in range(3):
                packet = Packet(wrong, type=DATA, packet=number, session=session)
                net.relay.send(1, 0, packet.bytes())
        stats = figures(net, 0, lambda stats: stats.foreign >= 9)
        assert (stats.foreign, stats.malformed) == (9, 0)
        other = net.submit(1, second, (values[1], values[1]), "f32", 2.0)
        for rank, mine in ((0, ticket), (1, other)):
            ended = net.end(rank, mine, 10)
            assert (ended.code, ended.report.packets_missing) == (0, 0)
            assert (values[rank] == 3.0).all()
