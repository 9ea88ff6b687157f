"""What links of a running laboratory do, counted at the receiver and set beside what was asked.

Every bound is of counts, or of a time below which nothing can be; none is of this machine's speed.
"""

from __future__ import annotations

import math
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lossycoll.errors import LabError
from lossycoll.lab import Lab, Link, Network, Port
from lossycoll.lab.backends import choose, missing
from lossycoll.lab.verify import SEGMENTS, bounds, flow, round_trips, verify
from tests.support.lab_kit import needs_lab

pytestmark = needs_lab

PACKETS = 20_000
MBIT = 200
FEW = 900
"""Packets that the kernel's backlog (net.core.netdev_max_backlog, 1000) holds: between namespaces
more than that may be lost where processors are short."""


def test_loss_bursts_and_delay_are_those_of_the_link() -> None:
    links = {(0, 1): Link(loss=0.05), (1, 0): Link(loss=0.05, burst=5), (0, 2): Link(delay_ms=20)}
    with Lab(Network(hosts=3, links=links)) as lab:
        for pair in ((0, 1), (1, 0)):
            for segments in (1, SEGMENTS):
                before = lab.counters().links[pair]
                one = flow(lab, pair, packets=PACKETS, mbit=MBIT, segments=segments)
                after = lab.counters().links[pair]
                assert one.overflowed == one.queued_out == 0
                low, high = bounds(links[pair], PACKETS)
                assert low < one.loss < high
                # Aggregates are cut: their packets are lost one by one.
                assert one.burst == pytest.approx(links[pair].mean_burst, rel=0.15)
                # The receiver and the switch counted the same.
                assert after.lost - before.lost == one.lost
                assert after.offered - before.offered == PACKETS
        clean = flow(lab, (2, 1), packets=PACKETS, mbit=MBIT, segments=SEGMENTS)
        assert (clean.received, clean.late, clean.doubled) == (PACKETS, 0, 0)
        # One way only: a round trip has 20 ms of delay, and is no second one.
        times = round_trips(lab, (0, 2), 5)
        assert min(times) >= 20
        assert statistics.median(times) < 2000
        assert sum(host.unasked for host in lab.counters().hosts) == 0


def test_links_change_while_they_carry() -> None:
    with Lab(hosts=2) as lab:
        lab.change((0, 1), loss=1)
        assert flow(lab, (1, 0), packets=100).received == 100
        assert flow(lab, (0, 1), packets=100).lost == 100
        lab.change((0, 1), loss=0)
        lab.change(delay_ms=30)
        assert min(round_trips(lab, (0, 1), 3)) >= 60
        lab.change(delay_ms=3)
        assert 6 <= min(round_trips(lab, (0, 1), 5)) < 60
        assert lab.network.link_of(1, 0) == Link(delay_ms=3)
        with pytest.raises(ValueError, match="loss is 2"):
            lab.change(loss=2)
        assert flow(lab, (0, 1), packets=100).received == 100


def test_rates_and_queues_are_shared() -> None:
    port = Port(up_mbit=100, down_mbit=20, queue_packets=40)
    with Lab(Network(hosts=3, port=port)) as lab:
        start = time.monotonic()
        one = flow(lab, (0, 1), packets=1000, mbit=60)
        elapsed = time.monotonic() - start
        down = lab.counters().hosts[1].down
        assert down.dropped == one.lost > 0
        assert down.queue_max <= 40 * 1514
        # No sooner than its rate lets them come.
        assert elapsed > one.received * 1514 / 2.5e6
        lab.change_port(1, down_mbit=None)
        one = flow(lab, (0, 1), packets=1000, mbit=60)
        after = lab.counters().hosts
        assert after[1].down.dropped == down.dropped
        # A sender that was kept from its core catches up at once: that its own queue may drop.
        assert one.lost == after[0].up.dropped
        assert 0 < after[0].up.queue_max <= 40 * 1514


def test_incast_meets_one_queue() -> None:
    """Each sender alone would fit; together they don't, and the port of the receiver shows it."""
    port = Port(down_mbit=20, queue_packets=30)
    with Lab(Network(hosts=4, ports={3: port})) as lab:
        assert flow(lab, (0, 3), packets=25).lost == 0
        with ThreadPoolExecutor(3) as pool:
            sent = pool.map(lambda i: flow(lab, (i, 3), packets=25 * 40, port=7000 + i), range(3))
            together = list(sent)
        down = lab.counters().hosts[3].down
        assert sum(one.lost for one in together) == down.dropped > 0
        assert down.queue_max <= 30 * 1514


def test_order_and_doubles() -> None:
    link = Link(delay_ms=1, reorder=0.05, hold_ms=3, duplicate=0.04)
    with Lab(Network(link=link)) as lab:
        for segments in (1, SEGMENTS):
            one = flow(lab, (0, 1), packets=PACKETS, mbit=MBIT, segments=segments)
            assert one.received == PACKETS
            assert one.doubled == pytest.approx(0.04 * PACKETS, rel=0.2)
            assert one.late == pytest.approx(0.05 * PACKETS, rel=0.25)
        counts = lab.counters().links[0, 1]
        assert counts.delivered == 2 * PACKETS + counts.doubled


NO_NETEM = missing("netem")


@pytest.mark.skipif(bool(NO_NETEM), reason=f"no netem here: {NO_NETEM}")
def test_netem_takes_a_rate_away_again() -> None:
    """As `--at 5:rate=none` wants: where no rate is named, netem keeps the one that it has."""
    network = Network(link=Link(rate_mbit=10), port=Port(up_mbit=20, down_mbit=20))
    with Lab(network, backend="netem") as lab:
        backend: Any = lab._running()
        for mbit in (30, None):
            lab.change(rate_mbit=mbit)
            lab.change_port(up_mbit=mbit, down_mbit=mbit)
            queues = [*backend._queues(0, "links").values()]
            for device in ("up0", "h0"):
                queues += backend._queues(backend.middle, device).values()
            rates = ["rate" in one["options"] for one in queues if one["kind"] == "netem"]
            assert rates == [mbit is not None] * 3


@pytest.mark.long
def test_the_same_seed_loses_the_same_packets() -> None:
    def lost(seed: int, backend: str) -> tuple[int, int]:
        with Lab(Network(link=Link(loss=0.1, burst=3), seed=seed), backend=backend) as lab:
            one = flow(lab, (0, 1), packets=FEW, mbit=100, segments=8)
            return one.lost, one.bursts

    for backend in ("switch", "nft"):
        if not missing(backend):
            assert lost(4, backend) == lost(4, backend) != lost(5, backend)


@pytest.mark.long
@pytest.mark.skipif(bool(missing("nft")), reason=f"no nft backend here: {missing('nft')}")
def test_the_packet_filter_loses_as_much() -> None:
    link = Link(loss=0.04, burst=3)
    assert choose(Network(link=link)) in ("nft", "netem")
    with Lab(Network(hosts=3, link=link), backend="nft") as lab:
        for segments in (1, SEGMENTS):
            before = lab.counters().links[0, 1]
            one = flow(lab, (0, 1), packets=PACKETS, mbit=MBIT, segments=segments)
            after = lab.counters().links[0, 1]
            drawn, offered = after.lost - before.lost, after.offered - before.offered
            assert drawn / offered == pytest.approx(0.04, rel=0.15)
            # What never came to the filter was lost in the backlog of a starved machine.
            assert one.lost == drawn + PACKETS - offered
        counts = lab.counters().links[0, 1]
        assert counts.lost / counts.bursts == pytest.approx(3, rel=0.15)
        assert lab.counters().links[2, 1].offered == 0
        lab.change((0, 1), loss=0)
        assert flow(lab, (0, 1), packets=FEW, mbit=MBIT, segments=SEGMENTS).lost == 0
        assert lab.counters().links[0, 1].lost == counts.lost
        with pytest.raises(LabError, match="nft makes loss alone"):
            lab.change(delay_ms=5)


@pytest.mark.long
def test_verify_says_what_is_not_as_asked() -> None:
    with Lab(Network(link=Link(loss=0.01, delay_ms=2))) as lab:
        (row,) = verify(lab, [(0, 1)])
        assert row.complaints == []
        assert row.round_trip_asked == 4 <= row.round_trip < math.inf
        # The switch is given another loss behind the laboratory's back.
        lab._running().change(lab.network.with_link(None, loss=0.2))
        (row,) = verify(lab, [(0, 1)])
        assert [text.partition(":")[0] for text in row.complaints] == ["plain", "aggregated"]
