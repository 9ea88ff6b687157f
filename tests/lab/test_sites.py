"""Sites of hosts of ranks: what lies between sites, who runs where, and what is counted of whom."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.micro.topology import less
from lossycoll.lab import Lab, Link, Network, Port
from lossycoll.lab.backends import missing
from lossycoll.lab.counters import LevelBytes
from lossycoll.lab.job import Ended
from lossycoll.lab.verify import GatewayCheck, bounds, chosen, flow, round_trips, verify_gateways
from tests.support.failure_cases import CALM
from tests.support.lab_kit import ROOT, command, needs_lab

pytestmark = needs_lab

FRAME = 1514
FEW = 900
"""Packets that the kernel's backlog (net.core.netdev_max_backlog, 1000) holds."""
WIDE = Network(
    sites=2,
    hosts=2,
    ranks=(2, 1, 1, 2),
    wan=Link(delay_ms=25),
    gateway=Port(up_mbit=100, down_mbit=100, queue_packets=60),
)


def _backend(name: str, *marks: pytest.MarkDecorator) -> Any:
    lacking = missing(name)
    return pytest.param(
        name, marks=[*marks, pytest.mark.skipif(bool(lacking), reason=f"no {name}: {lacking}")]
    )


BACKENDS = [_backend("switch"), _backend("nft", pytest.mark.long), _backend("netem")]


def test_ranks_of_a_host_share_it() -> None:
    script = 'echo "$RANK $LOCAL_RANK $GROUP_RANK $LOSSYCOLL_SITE $(readlink /proc/self/ns/net)"'
    with Lab(WIDE) as lab:
        ended = lab.run(["sh", "-c", script])
        before = lab.counters().levels
        # Over the host's own address.
        assert flow(lab, (0, 0), packets=100).received == 100
        assert lab.counters().levels == before
    said = [one.output.split() for one in ended]
    assert [(one[1], one[2], one[3]) for one in said] == [
        ("0", "0", "site0"),
        ("1", "0", "site0"),
        ("0", "1", "site0"),
        ("0", "2", "site1"),
        ("0", "3", "site1"),
        ("1", "3", "site1"),
    ]
    spaces = [one[4] for one in said]
    assert spaces[0] == spaces[1]
    assert spaces[4] == spaces[5]
    assert len(set(spaces)) == 4


def test_hosts_share_the_way_out_of_their_site() -> None:
    with Lab(WIDE) as lab:
        # Within a site there is neither rate nor delay; from the other it takes both ways.
        assert flow(lab, (0, 1), packets=1000, mbit=400).lost == 0
        assert all(level.dropped == 0 for s in lab.counters().sites for level in (s.up, s.down))
        assert min(round_trips(lab, (0, 1), 5)) < 50 <= min(round_trips(lab, (1, 2), 3))
        assert flow(lab, (0, 2), packets=50).lost == 0
        start = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            pairs = ((0, 2), (1, 3))
            sent = list(pool.map(lambda p: flow(lab, p, packets=1000, port=7000 + p[0]), pairs))
        elapsed = time.monotonic() - start
        up, down = lab.counters().sites[0].up, lab.counters().sites[1].down
        assert sum(one.lost for one in sent) == up.dropped + down.dropped
        assert up.dropped > 0
        assert up.queue_max <= 60 * FRAME
        # No sooner than the rate of both together lets them come.
        assert elapsed > sum(one.received for one in sent) * FRAME / 12.5e6
        lab.change_wan(rate_mbit=None, up_mbit=None, down_mbit=None, loss=1)
        assert flow(lab, (3, 1), packets=50).received == 0
        assert flow(lab, (3, 2), packets=50).received == 50


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_are_counted_by_level(backend: str) -> None:
    """The same of every backend, and loss is drawn between sites alone."""
    lossy = Network(sites=2, hosts=2, wan=Link(loss=0.2))
    with Lab(lossy, backend=backend) as lab:
        before = lab.counters().levels
        near = flow(lab, (0, 1), packets=FEW, mbit=200)
        far = flow(lab, (1, 2), packets=FEW, mbit=200)
        after = lab.counters().levels
    added = {name: less(level, before[name]) for name, level in after.items()}
    assert near.lost == 0
    low, high = bounds(lossy.wan, FEW)
    assert low < far.loss < high
    sent = FEW * FRAME
    # What is lost left, but doesn't come. The kernel's backends lose packets where they come.
    came = far.received * FRAME if backend == "switch" else sent
    assert added["host"] == LevelBytes((sent, sent, 0, 0), (0, sent, came, 0))
    assert added["site"] == LevelBytes((sent, 0), (0, came))


def test_the_command_knows_levels(tmp_path: Path) -> None:
    out = tmp_path / "counters.json"
    network = "--sites 2 --hosts 1 --ranks 2,1 --wan cross-dc,rate=100m,delay=3ms --backend switch"
    with command(
        *network.split(), "--counters", str(out), "--", "sh", "-c", "echo $RANK at $LOSSYCOLL_SITE"
    ) as process:
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    assert "lab: 2 hosts at 2 sites with 3 ranks, backend switch" in text
    for rank, site in enumerate((0, 0, 1)):
        assert f"[{rank}] {rank} at site{site}" in text
    assert "lab: MB that left / entered each site: 0.00 / 0.00, 0.00 / 0.00" in text
    counted = json.loads(out.read_text())
    assert counted["network"]["ranks"] == [2, 1]
    assert counted["network"]["wan"]["delay_ms"] == 3
    assert counted["network"]["gateway"]["up_mbit"] == 100
    assert counted["levels"]["site"] == {"out": [0, 0], "into": [0, 0]}


def test_verify_measures_each_site_and_the_ways_between() -> None:
    three = Network(sites=3, hosts=2)
    assert chosen(three) == [
        *((0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4)),
        *((0, 2), (2, 0), (0, 4), (4, 0)),
    ]
    assert chosen(Network(hosts=3)) == [(0, 1), (1, 0), (0, 2), (2, 0)]
    assert GatewayCheck((0, 1), 100, 125, 104, 20).complaints == []
    (text,) = GatewayCheck((0, 1), 100, 125, 106, 0).complaints
    assert text == "106.0 Mbit/s got through, wanted at most 105.0"
    with Lab(WIDE) as lab:
        checks = list(verify_gateways(lab))
    assert [one.sites for one in checks] == [(0, 1), (1, 0)]
    assert [one.complaints for one in checks] == [[], []]
    assert all(one.dropped > 0 and one.got > 10 for one in checks), checks


@pytest.mark.long
def test_verify_of_the_command() -> None:
    wan = "rate=200m,delay=10ms,loss=2%,queue=20ms"
    network = ("--sites", "2", "--hosts", "2", "--wan", wan, "--backend", "switch")
    with command("verify", *network, "--mbit", "100", "--json") as process:
        text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    said = json.loads(text)
    loss = {tuple(row["pair"]): row["link"]["loss"] for row in said["links"]}
    assert set(loss) == {(0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0)}
    assert {pair for pair, asked in loss.items() if asked} == {(0, 2), (2, 0)}
    assert [one["asked"] for one in said["gateways"]] == [200, 200]


def said_by(ended: Ended) -> Any:
    """What a rank that ended well says that it found."""
    assert ended.code == 0, ended.output
    (line,) = (text for text in ended.output.splitlines() if text.startswith("found "))
    return json.loads(line.removeprefix("found "))


@pytest.mark.long
def test_ranks_reduce_within_hosts_and_between_sites() -> None:
    """gloo and lossy, two ranks on each of two hosts at each of two sites."""
    wan = "rate=200m,delay=2ms,loss=2%"
    network = ("--sites", "2", "--hosts", "2", "--ranks", "2", "--wan", wan)
    job = (sys.executable, str(ROOT / "tests" / "support" / "lab_ranks.py"))
    with command(*network, "--backend", "switch", "--", *job) as process:
        text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    lines = [line for line in text.splitlines() if '"rank"' in line]
    said = [json.loads(line.partition(" ")[2]) for line in lines]
    assert len(said) == 8
    for mine in said:
        assert mine["gloo"] == [36.0]
        assert 36.0 in mine["lossy"]
    assert sum(mine["missing"] for mine in said) > 0


@pytest.mark.long
def test_replicas_stay_together_where_hosts_of_ranks_lose_packets() -> None:
    """As the methods promise: DriftBound heals with each sweep what was lost, ShardedOptimizer lets
    nothing get older than max_age (which the ranks check)."""
    lossy = Network(sites=2, hosts=1, ranks=2, wan=Link(loss=0.1))
    # Many packets, and all lossy that may be.
    small = {"LOSSYCOLL_MTU": "576", "LOSSYCOLL_LOSSY_MIN_BYTES": "0"}
    environment = {**CALM, **small, "PYTHONPATH": str(ROOT)}
    with Lab(lossy, backend="switch") as lab:
        job = [sys.executable, "-m", "tests.support.host_training"]
        ranks = [said_by(one) for one in lab.run(job, environment, timeout=200)]
    assert [one["hosts"] for one in ranks] == [[0, 0, 1, 1]] * 4
    assert all(one["missing"] > 0 for one in ranks)
    for one in ranks:
        first, *_, last = one["sweeps"]
        assert one["sweeps"] == ranks[0]["sweeps"]
        assert 0 < first["apart"] < 0.3, "a tenth of what crosses, both ways, and chance"
        assert last["apart"] < first["apart"]
        assert all(sweep["strange"] == 0 for sweep in one["sweeps"])
        assert one["sharded"]["stale"] > 0
        losses = one["sharded"]["losses"]
        assert sum(losses[-2:]) < sum(losses[:2])


LEARNING = """
import json
import torch.distributed as dist
import lossycoll
dist.init_process_group("lossy")
dist.barrier()
print("found", json.dumps(lossycoll.topology().sites))
dist.destroy_process_group()
"""


@pytest.mark.long
def test_sites_are_learnt_from_round_trips() -> None:
    wide = Network(sites=2, hosts=2, ranks=(2, 1, 1, 1), wan=Link(delay_ms=30, loss=0.05))
    environment = {**CALM, "LOSSYCOLL_SITE": "auto", "PYTHONPATH": str(ROOT)}
    with Lab(wide, backend="switch") as lab:
        ended = lab.run([sys.executable, "-c", LEARNING], environment, timeout=200)
    assert [said_by(one) for one in ended] == [[0, 0, 0, 1, 1]] * 5
