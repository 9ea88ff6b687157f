"""Sites learnt from round trips: python -m benchmarks.micro.learnt_sites

Prints a markdown table: in networks of the laboratory (docs/lab.md says what it needs), which sites
are found, and the seconds that making a group takes, with sites that are named and with sites that
are learnt, in turns. Every group has sockets of its own, as a process's first one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from benchmarks.common.lab_job import run_job
from benchmarks.common.tables import Table, add_report
from lossycoll.cli.argtypes import names, whole
from lossycoll.lab import Lab, Link, Network
from lossycoll.lab.profiles import profile

NETWORKS: Final = {
    "two-sites": replace(profile("two-sites"), ranks=1),
    "bad-wan": Network(sites=2, hosts=2, wan=Link(delay_ms=10, loss=0.05, jitter_ms=3)),
    "three-sites": Network(sites=3, hosts=2, wan=Link(delay_ms=5, loss=0.01)),
    "campus": Network(sites=2, hosts=2, wan=Link(delay_ms=0.4)),
    "cloud": profile("cloud"),
    "home": profile("home"),
}
WORDS: Final = {
    "two-sites": "2 x 2 hosts, round trip of 40 ms between sites, 1% lost",
    "bad-wan": "2 x 2 hosts, 20 ms, 5% lost, jitter of 3 ms",
    "three-sites": "3 x 2 hosts, 10 ms, 1% lost",
    "campus": "2 x 2 hosts, 0.8 ms, as between two halls",
    "cloud": "`cloud`: 4 hosts, 0.5 ms",
    "home": "`home`: 4 hosts, 30 ms",
}
TABLE: Final = Table(
    "learnt-sites.md",
    "learnt-sites",
    "network | sites found | named, s | learnt, s | of it measuring, s",
    keys=1,
)
JOB_SECONDS: Final = 500.0


def measure(network: Network, rounds: int) -> list[dict[str, Any]]:
    """What each rank says of its groups: see learnt_sites_rank."""
    with Lab(network) as lab:
        module = "benchmarks.micro.learnt_sites_rank"
        return run_job(lab, module, {"rounds": rounds}, JOB_SECONDS)


def row(name: str, ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Medians and slowest: of rank 0's groups, and of the rank that measured longest."""
    found = Counter(tuple(sites) for sites in ranks[0]["sites"])
    measuring = [max(times) for times in zip(*(rank["measuring"] for rank in ranks), strict=True)]
    seconds = [ranks[0]["named"], ranks[0]["learnt"], measuring]
    often = {sites: f"{times} times" for sites, times in found.items()}
    if len(found) == 1:
        often = dict.fromkeys(found, "always")
    return [
        WORDS.get(name, name),
        "; ".join(f"{_text(sites)}, {times}" for sites, times in often.items()),
        *(f"{statistics.median(times):.2f}, {max(times):.2f}" for times in seconds),
    ]


def _text(sites: Sequence[int]) -> str:
    return " ".join(map(str, sites)) if any(sites) else "one site"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=whole(1), default=10, help="groups of each kind (%(default)s)")
    every = tuple(NETWORKS)
    add("--networks", type=names(every), default=every, help=f"of {', '.join(every)}")
    add_report(parser, TABLE.page)
    options = parser.parse_args()
    rows = [row(name, measure(NETWORKS[name], options.rounds)) for name in options.networks]
    print(TABLE.report(options.report, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
