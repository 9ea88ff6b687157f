"""The control law on a path of the laboratory: it is found, filled, and not overrun.

What the law does in detail is asserted in simulated time by tests/native/test_pace.c; here it meets
real sockets, the kernel's stamps and whatever else the machine does.
"""

from __future__ import annotations

import json
import sys

from lossycoll.lab import Lab, Link, Network, Port
from tests.support.lab_kit import ROOT, needs_lab

pytestmark = needs_lab

MBIT = 100.0
RTT_MS = 20.0
LOSS = 0.02
PATH = Network(
    hosts=2,
    link=Link(loss=LOSS, delay_ms=RTT_MS / 2),
    port=Port(up_mbit=MBIT, down_mbit=MBIT, queue_ms=25),
)


def test_the_path_is_found_and_not_overrun() -> None:
    with Lab(PATH) as lab:
        ranks = [sys.executable, str(ROOT / "tests" / "support/congestion_ranks.py")]
        ended = lab.run(ranks, {"OMP_NUM_THREADS": "1", "LOSSYCOLL_LOG": "warning"}, timeout=120)
        counters = lab.counters()
    assert [one.code for one in ended] == [0, 0], ended
    offered = sum(link.offered for link in counters.links.values())
    lost = sum(link.lost for link in counters.links.values())
    assert lost > 0.5 * LOSS * offered
    # A host sends 90 times what its queue holds: who just sends loses most of it there.
    dropped = sum(host.up.dropped + host.down.dropped for host in counters.hosts)
    assert dropped < 0.05 * offered, counters
    for one in ended:
        (said,) = [json.loads(line) for line in one.output.splitlines() if line.startswith("{")]
        assert said["missing"] > 0
        assert set(said["values"]) <= {2.0, 3.0, 4.0}
        assert said["rtt_ns"] >= RTT_MS * 1e6
        # Threads that sleep make trains look faster and rounds slower; the order is right.
        assert 0.2 * MBIT < said["rate"] * 8e-6 < 4 * MBIT
        assert said["window"] * 1500 >= 0.2 * MBIT * 1e6 / 8 * RTT_MS / 1e3
