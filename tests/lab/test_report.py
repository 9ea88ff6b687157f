"""What a laboratory says of itself: its network at the start, and what took packets by the end."""

from __future__ import annotations

import json

from lossycoll.lab import Link, Network, Port, report
from lossycoll.lab.counters import Counters, HostCounts, LinkCounts, PortCounts, QueueCounts
from lossycoll.lab.tcp import Flows, FlowTook, Took, placed


def link(lost: int, dropped: int = 0) -> LinkCounts:
    return LinkCounts(100, lost, 100 - lost, 1, lost, queue=QueueCounts(100, 0, dropped))


def host(up: QueueCounts, down: QueueCounts) -> HostCounts:
    return HostCounts(up, down)


NOTHING = QueueCounts(100)
COUNTERS = Counters(
    {(0, 1): link(3, 2), (1, 0): link(5)},
    (
        host(QueueCounts(200, 0, 7), QueueCounts(100, 0, 0, 0, 11)),
        host(QueueCounts(300, 0, 0, 0, 30), NOTHING),
    ),
    (PortCounts(NOTHING, QueueCounts(100, 0, 13)), PortCounts(NOTHING, NOTHING)),
)


def test_each_packet_is_in_one_row() -> None:
    rows = {row.where: row for row in report.rows(COUNTERS)}
    assert rows["host 0 sent"] == report.Row("host 0 sent", 200, 3, 7 + 2, 0)
    assert rows["host 0 received"] == report.Row("host 0 received", 100, 0, 0, 11)
    assert rows["host 1 sent"] == report.Row("host 1 sent", 300, 5, 0, 30)
    assert rows["site 0 received"] == report.Row("site 0 received", 100, 0, 13, 0)
    assert sum(row.lost for row in rows.values()) == 3 + 5 + 7 + 2 + 11 + 30 + 13
    said = [line.split() for line in report.took(COUNTERS)]
    assert said[0] == ["packets", "injected", "queues", "policers"]
    assert ["host", "0", "sent", "200", "3", "(1.50%)", "9", "(4.50%)", "-"] in said
    # Who lost nothing isn't shown; the sum is of what hosts sent.
    assert not any(line[:3] == ["host", "1", "received"] for line in said)
    assert said[-1][:6] == ["all", "hosts", "sent", "500", "8", "(1.60%)"]
    named = [line.split() for line in report.took(COUNTERS, {(0, 1)})]
    assert named[:-1] == said
    assert named[-1] == ["of", "it", "link", "0-1", "102", "3", "(2.94%)", "2", "(1.96%)", "-"]


def test_a_long_table_shows_the_worst() -> None:
    hosts = [host(QueueCounts(100, 0, n), NOTHING) for n in range(1, 41)]
    said = report.took(Counters({}, tuple(hosts), (PortCounts(NOTHING, NOTHING),)))
    assert [line.split()[1] for line in said[1:-2]] == [str(n) for n in range(24, 40)]
    assert said[-1] == "and 24 more, in --counters"


def test_the_start_says_what_nobody_wrote() -> None:
    port = Port(up_mbit=1000)
    assert report.network(Network()) == []
    (said,) = report.network(Network(port=port))
    assert said == (
        "each host: 1000 Mbit/s up, queues of 25 ms of the rate, and 64 packets at least: 3125 KB"
    )
    lines = report.network(
        Network(
            sites=2,
            hosts=2,
            port=Port(up_mbit=10, down_mbit=100, policer_ms=10),
            link=Link(loss=0.01, burst=4, delay_ms=5, jitter_ms=1, spread_ms=2),
            wan=Link(reorder=0.1, duplicate=0.2),
            gateway=Port(down_mbit=80, queue_packets=10),
            links={(0, 1): Link(rate_mbit=8, queue_ms=10)},
            congestion="reno",
        )
    )
    assert lines == [
        "each host: 10 Mbit/s up, 100 Mbit/s down, policers of 10 ms, 12 and 125 KB",
        "each link within a site: 1% lost in bursts of 4, 5 ms one way, jitter of 1 ms to both "
        "sides, in order, each packet up to 2 ms later, out of order",
        "each site's gateway: 80 Mbit/s down, queues of 10 packets, 15 KB",
        "each link between sites: 10% held back by 1 ms, 20% doubled",
        "link 0-1: 8 Mbit/s of its own, queues of 10 ms, 10 KB",
        "TCP: reno",
    ]


def test_flows_go_round_all_hosts() -> None:
    around, back = Flows("reno", 4), Flows("bbr", 2, (2, 0))
    pairs = ((0, 1), (1, 2), (2, 0), (0, 1))
    assert placed([around, back], Network(hosts=3)) == [
        *((around, pair) for pair in pairs),
        *[(back, (2, 0))] * 2,
    ]


def test_what_flows_took_is_said() -> None:
    times = (1.0,) * 90 + (5.0,) * 10
    took = Took((FlowTook("bbr", (0, 1), 2.0, 5_000_000, 7),), times)
    assert report.tcp(took) == [
        "TCP bbr 0-1: 5.0 MB, 20.0 Mbit/s, 7 packets resent",
        "round trips 0-1: P50 1.00 ms, P99 5.00, P99/P50 5.00",
    ]
    data = json.loads(json.dumps(report.tcp_data(took)))
    assert data["flows"][0]["mbit"] == 20
    assert data["round_trips"] == {"p50_ms": 1, "p99_ms": 5, "p99/p50": 5}
    silent = Took((), ())
    assert report.tcp(silent) == ["round trips 0-1: none came back"]
    assert report.tcp_data(silent)["round_trips"] is None
