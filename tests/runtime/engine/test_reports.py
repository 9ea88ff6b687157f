"""The fixed rate, and what the figures say of packets, links and deadlines."""

from __future__ import annotations

import socket
import time
from functools import partial

import numpy as np

from lossycoll.plan import (
    Missing,
    data_movement,
    faults,
    hierarchical,
    packet_count,
)
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.reports import Cause, PeerStats
from tests.oracle import masks, reference_executor
from tests.support.engine_sums import (
    all_reduce,
    inputs_of,
)
from tests.support.network import GROUP, Network, elements
from tests.support.waiting import until

# ---- the fixed rate ----


def test_a_fixed_rate_is_kept() -> None:
    """Bytes over a second stay below rate and burst, and near the rate; nothing is lost."""
    rate, count = 5e6, 2_500_000
    with Network(2, 1408, pace=rate) as network:
        plans = [data_movement.gather(2, r, (count, 0), 352, root=1) for r in range(2)]
        sent = elements("f32", count, np.random.default_rng(1))
        got = np.zeros(count, np.float32)
        nothing = np.zeros(0, np.float32)
        begin = time.monotonic()
        tickets = [
            network.submit(0, plans[0], (sent, nothing), "f32"),
            network.submit(1, plans[1], (nothing, got), "f32"),
        ]
        time.sleep(0.2)
        first = (time.monotonic(), network.engines[0].peer_stats(1).packets_sent)
        time.sleep(1.0)
        second = (time.monotonic(), network.engines[0].peer_stats(1).packets_sent)
        ended = [network.end(r, ticket, 30) for r, ticket in enumerate(tickets)]
        took = time.monotonic() - begin
        between = (second[1] - first[1]) * 1456
        # The figures are up to 50 ms old each.
        assert between < rate * (second[0] - first[0] + 0.1) + 2 * 65536
        assert between > 0.3 * rate
        assert all(e.code == 0 and e.report.packets_missing == 0 for e in ended)
        assert ended[0].report.bytes_sent < rate * took + 2 * 65536
        assert took < 3 * ended[0].report.bytes_sent / rate
        np.testing.assert_array_equal(got, sent)


# ---- figures ----


def test_reports_count_contributions_and_what_is_missing() -> None:
    world, count = 4, 50_000
    inject = "loss=0.3,seed=9"
    with Network(world, 1408, inject=inject) as network:
        plans = [
            hierarchical.all_reduce(world, r, count, 352, missing=Missing.KEEP)
            for r in range(world)
        ]
        data = inputs_of(network, plans, 3)
        begins = [x.copy() for x in data]
        ended = network.run(plans, data, data, "f32", 4.0)
        want = reference_executor.execute(plans, begins, begins, "f32", 4.0, _lost(inject, 0), 0)
        for rank in range(world):
            report = ended[rank].report
            assert report.packets_missing == want[rank].packets_missing > 0
            assert report.packets_injected > 0
            assert report.kept == want[rank].kept > 0
            assert 1 <= report.contributions_min <= report.contributions_mean <= world
            assert report.contributions_mean < world
            assert report.elapsed > 0
            assert report.packets_sent > 0
            assert report.bytes_sent > report.packets_sent * 48
            slots = plans[rank].slots
            due = sum(len(slot.sources) * packet_count(slot.length, 352) for slot in slots)
            assert report.packets_received + report.packets_missing == due
            assert report.cause == Cause.LOSS
            assert network.engines[rank].last_report() == report
        mine, whole = network.engines[0], ended[0].report

        def by_peer() -> list[PeerStats]:
            return [mine.peer_stats(p) for p in range(1, world)]

        # The engine publishes its figures now and then.
        until(lambda: mine.stats().operations == 1)
        until(lambda: sum(p.packets_missing for p in by_peer()) == whole.packets_missing)
        until(lambda: sum(p.packets_received for p in by_peer()) == whole.packets_received)
        until(lambda: all(0.3 < p.delivery_rate < 0.95 for p in by_peer()))


def test_what_a_link_loses_shows_though_all_of_it_comes_back() -> None:
    loss = 0.05
    with Network(2, 1408, inject=f"loss={loss},seed=3") as network:
        plans = all_reduce(network, "transpose", 1_000_000)
        data = inputs_of(network, plans, 1)
        ended = network.run(plans, data, data, "f32", reliable=True)
        assert all(one.code == 0 and one.report.packets_missing == 0 for one in ended)
        for engine in network.engines:
            until(lambda at=engine: at.stats().operations == 1)  # type: ignore[misc]
            assert engine.stats().packets_missing == 0
            assert 0.5 * loss < engine.stats().resent_rate < 2 * loss


def test_what_a_link_loses_and_in_what_runs_is_known_without_resending() -> None:
    loss, burst = 0.2, 4.0
    with Network(2, 1408, inject=f"loss={loss},burst={burst:g},seed=5") as network:
        plans = all_reduce(network, "transpose", 2_000_000)
        data = inputs_of(network, plans, 1)
        ended = network.run(plans, data, data, "f32")
        assert all(one.report.packets_injected > 500 for one in ended), "the fault did not happen"

        def is_known(engine: EngineGroup, peer: int) -> bool:
            found = engine.peer_stats(peer)
            near = abs(found.link_loss / loss - 1) < 0.3 and abs(found.link_burst / burst - 1) < 0.4
            return near and not engine.stats().packets_resent

        for rank, engine in enumerate(network.engines):
            until(lambda at=engine, peer=1 - rank: is_known(at, peer))  # type: ignore[misc]


def _lost(inject: str, op: int) -> reference_executor.Lost:
    return partial(masks.lost, faults.parse(inject), GROUP, op)


def test_the_deadline_is_learnt() -> None:
    floor, ceiling = 0.05, 20.0
    with Network(2, 1408, deadline_min=floor, deadline_max=ceiling) as network:
        peer = network.engines[0].peer_stats(1)
        assert peer.deadline_ns in (0, int(ceiling * 1e9))
        plans = all_reduce(network, "ring", 100_000)
        for turn in range(20):
            data = inputs_of(network, plans, turn)
            network.run(plans, data, data, "f32")
        until(lambda: 0 < network.engines[0].peer_stats(1).deadline_ns < ceiling * 1e9)
        peer = network.engines[0].peer_stats(1)
        assert floor * 1e9 <= peer.deadline_ns < ceiling * 0.5e9
        assert 0 < peer.rtt_ns < 5e9


def test_an_idle_engine_ignores_what_is_not_a_packet() -> None:
    with Network(2, 1408) as network:
        port = network.engines[0].link().port
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as raw:
            for size in (0, 1, 47, 48, 1500):
                raw.sendto(bytes(size), ("127.0.0.1", port))
        until(lambda: network.engines[0].stats().malformed == 5)
