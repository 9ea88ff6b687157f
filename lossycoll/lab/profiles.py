"""Networks by name, each with what is known of it and what is assumed.

Round trips and losses are of what was published; where nothing was, ``assumed`` says so. None of
them is a measurement of a reader's own network.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

from ..errors import OptionError
from .network import Link, Network, Port


@dataclass(frozen=True)
class Profile:
    """A network, in one line what it stands for, where its numbers come from, what is assumed."""

    network: Network
    meaning: str
    source: str
    assumed: str


PROFILES: Final = {
    "clean": Profile(
        Network(),
        "no loss, no delay, no rate: what the machine itself does",
        "nothing to cite",
        "nothing",
    ),
    "lan-incast": Profile(
        Network(
            hosts=8,
            link=Link(delay_ms=0.1),
            port=Port(up_mbit=1000, down_mbit=1000, queue_packets=64),
        ),
        "one rack of 1 Gbit/s hosts behind a switch with shallow buffers; all loss is of queues",
        "Vasudevan et al., SIGCOMM 2009 (incast at 1 Gbit/s, round trips of some 100 us, 32 to "
        "256 KB of buffer per port)",
        "a buffer of 96 KB per port, not shared between ports",
    ),
    "cloud": Profile(
        Network(
            hosts=4,
            link=Link(loss=1e-4, delay_ms=0.25, jitter_ms=0.1),
            port=Port(up_mbit=2000, down_mbit=2000, queue_packets=512),
        ),
        "virtual machines in one region of a cloud",
        "Guo et al., Pingmesh, SIGCOMM 2015 (medians of 0.22 to 0.27 ms, 99th percentiles of 1.3 "
        "ms; drops of 1e-5 to 1e-4)",
        "the rate, which a common machine carries; queues; single losses; jitter of 0.1 ms",
    ),
    "cross-dc": Profile(
        Network(
            hosts=4,
            link=Link(loss=0.01, burst=4, delay_ms=10, jitter_ms=0.5),
            port=Port(up_mbit=1000, down_mbit=1000, queue_ms=10),
        ),
        "data centres some 1500 km apart, over a path that others use too",
        "Khalilov et al., SDR-RDMA, arXiv 2505.05366, 2025 (training across data centres, where "
        "drop rates differ by orders of magnitude); 5 us per km of fibre, with detours",
        "loss of 1% in bursts of 4, a bad day rather than a good one; a share of 1 Gbit/s",
    ),
    "two-sites": Profile(
        Network(
            sites=2,
            hosts=2,
            ranks=2,
            wan=Link(loss=0.01, delay_ms=20),
            gateway=Port(up_mbit=1000, down_mbit=1000, queue_ms=25),
        ),
        "two data centres some 3000 km apart, with hosts of several ranks in each",
        "as cross-dc: Khalilov et al., 2025; 5 us per km of fibre, with detours",
        "as cross-dc, but single losses; a network without loss, delay or rate within each site",
    ),
    "transatlantic": Profile(
        Network(
            hosts=2,
            link=Link(loss=0.005, burst=4, delay_ms=38, jitter_ms=1),
            port=Port(up_mbit=500, down_mbit=500, queue_ms=20),
        ),
        "New York to London over the public Internet",
        "Verizon's IP latency statistics (a target of 90 ms there and back, some 70 to 76 ms "
        "published by month; 99.5% of packets delivered)",
        "loss at that target, in bursts of 4; a share of 500 Mbit/s",
    ),
    "home": Profile(
        Network(
            hosts=4,
            link=Link(loss=0.01, burst=8, delay_ms=15, jitter_ms=4, reorder=0.001),
            port=Port(up_mbit=40, down_mbit=200, queue_ms=100),
        ),
        "people at home, on cable or fibre behind wireless routers",
        "FCC, Measuring Broadband America, fixed broadband reports (10 to 30 ms in the last mile; "
        "loss below 0.4% for most and above 1% for some at peak times); Gettys and Nichols, CACM "
        "55(1), 2012 (queues of 100 ms and more)",
        "loss of 1% in bursts of 8, as wireless links add their own; 40 Mbit/s up and 200 down",
    ),
}


def profile(name: str) -> Network:
    if name not in PROFILES:
        near = difflib.get_close_matches(name, PROFILES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PROFILES)}"
        raise OptionError(f"no profile is called {name!r}; {hint}")
    return PROFILES[name].network
