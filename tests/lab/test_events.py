"""What happens in a laboratory while a job runs: changes at times, policers, TCP beside it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lossycoll.errors import LabError
from lossycoll.lab import Lab, Link, Network, Port
from lossycoll.lab.tcp import Flows, running
from lossycoll.lab.verify import SEGMENTS, flow
from tests.support.lab_kit import ROOT, command, needs_lab

pytestmark = needs_lab

FRAME = 1514
SETTINGS = Path("/proc/sys/net/ipv4")
TALK = [sys.executable, str(ROOT / "tests" / "support/lab_talk.py")]
"""Rank 0 asks rank 1 until that has answered and then been silent for long."""


def report_of(*arguments: str) -> tuple[str, dict[str, Any]]:
    with command(*arguments) as process:
        text, _ = process.communicate(timeout=100)
    assert process.returncode == 0, text
    (data,) = [json.loads(line) for line in text.splitlines() if line.startswith('{"network"')]
    return text, data


def test_what_changes_when_and_what_took_packets_is_said() -> None:
    text, data = report_of(
        *("--backend", "switch", "--json", "--at", "1.5:0-1:loss=100%"),
        *("--at", "0.5:rate=20,policer=50", "--timeout", "60", "--", *TALK),
    )
    # Rank 0 ends when nothing is answered any more, so the loss was in force by then.
    assert "[0] silent after" in text
    assert text.index("lab: after 0.5 s: rate=20") < text.index("lab: after 1.5 s: 0-1:loss=100%")
    assert [one["at"] for one in data["changes"]] == [0.5, 1.5]
    lost = data["links"]["0-1"]["lost"]
    assert lost >= 10
    rows = {row["where"]: row for row in data["took"]}
    assert rows["host 0 sent"]["injected"] == lost == sum(row["injected"] for row in rows.values())
    assert re.search(rf"of it link 0-1 +{data['links']['0-1']['offered']} +{lost} \(", text)


def test_a_policer_drops_what_its_bucket_has_no_tokens_for() -> None:
    bucket = 50 * 125 * 20  # 20 ms of 50 Mbit/s
    with Lab(Network(port=Port(up_mbit=50, policer_ms=20))) as lab:
        for segments in (1, SEGMENTS):
            before = lab.counters().hosts[0].up
            one = flow(lab, (0, 1), packets=2000, mbit=150, segments=segments)
            after = lab.counters().hosts[0].up
            assert after.policed - before.policed == one.lost == one.queued_out > 0
            # The bucket, and what has filled it since: no more gets through.
            assert one.received * FRAME <= bucket + one.sending * 6.25e6
            assert one.received >= bucket // FRAME
            assert one.late == 0
        assert after.dropped == 0
        assert after.queue_max <= bucket
        lab.change_port(0, policer_ms=None, up_mbit=None)
        assert flow(lab, (0, 1), packets=1000, mbit=150).lost == 0


def test_packets_of_a_spread_overtake_and_those_of_a_jitter_do_not() -> None:
    links = {(0, 1): Link(spread_ms=4), (1, 0): Link(delay_ms=4, jitter_ms=4)}
    with Lab(Network(links=links)) as lab:
        spread = flow(lab, (0, 1), packets=4000, mbit=100)
        assert (spread.received, spread.doubled) == (4000, 0)
        assert spread.late > 1000
        wandering = flow(lab, (1, 0), packets=4000, mbit=100)
        assert (wandering.received, wandering.late) == (4000, 0)


@pytest.mark.parametrize("how", ["cubic", "reno", "bbr"])
def test_tcp_of_all_hosts_has_the_congestion_control_that_is_asked_for(how: str) -> None:
    allowed = (SETTINGS / "tcp_allowed_congestion_control").read_text().split()
    network = Network(congestion=how)
    if how in allowed:
        with Lab(network) as lab:
            ended = lab.run(["cat", str(SETTINGS / "tcp_congestion_control")])
        assert [one.output.strip() for one in ended] == [how, how]
        return
    with pytest.raises(LabError) as caught, Lab(network):
        pass
    assert how in str(caught.value)
    assert "tcp_allowed_congestion_control" in str(caught.value) or "modprobe" in str(caught.value)


def test_a_congestion_control_that_is_nowhere_is_refused_by_name() -> None:
    with pytest.raises(LabError, match=r"no congestion control called 'nowhere'; it has .*reno"):
        Lab(congestion="nowhere").__enter__()
    with (
        Lab() as lab,
        pytest.raises(LabError, match="no congestion control called 'nowhere'"),
        running(lab, [Flows("reno"), Flows("nowhere")]),
    ):
        pass


def test_tcp_beside_a_job_makes_a_tail_and_its_figures_add_up() -> None:
    network = "--hosts 3 --up-mbit 50 --down-mbit 50m --delay-ms 2ms --queue-ms 20"
    flows_wanted = ("--tcp", "reno:3@30%", "--tcp", "reno:1:2-0@30%")
    text, data = report_of(*network.split(), "--json", *flows_wanted, "--", "sleep", "2")
    flows = data["tcp"]["flows"]
    assert [tuple(one["pair"]) for one in flows] == [(0, 1), (1, 2), (2, 0), (2, 0)]
    sent = [0, 0, 0]
    for one in flows:
        assert one["bytes"] > 100_000
        sent[one["pair"][0]] += one["bytes"]
    for host, payload in enumerate(sent):
        # All of it passed the host's port, in frames, and no more than its rate lets.
        assert payload < data["hosts"][host]["up"]["bytes"]
        # Both flows of host 2 share its port, and are silent for most of the time.
        assert payload <= 6.25e6 * (0.3 * max(one["seconds"] for one in flows) + 1)
    # A third of the time there is a queue, so the tail has it, and the middle hasn't.
    times = data["tcp"]["round_trips"]
    assert 4 <= times["p50_ms"] <= times["p99_ms"]
    assert times["p99/p50"] > 1.5
    assert text.count("lab: TCP reno ") == 4
