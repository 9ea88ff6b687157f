"""A swarm of many peers on one machine, without torch: python -m benchmarks.micro.many_peers

A process of its own for the directory and for each peer, with its engine. Each peer joins, waits
for all, and averages the same number of values again and again over loopback. Prints a markdown
table: until the last peer has had its first round, how long rounds take, and what peers take of the
machine. All of them share its cores, so that seconds are theirs.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

from benchmarks.common.tables import Table, add_report
from benchmarks.micro.directory import Part, all_of
from lossycoll.cli.argtypes import whole

HEAD: Final = (
    "peers",
    "values of each, MiB",
    "processes started after, s",
    "all have joined after, s",
    "all have had a round after, s",
    "round, s: median, longest",
    "members",
    "contributions",
    "rounds that failed",
    "mean of all kept within",
    "memory of a peer, MiB: its own, resident",
    "of the directory",
    "CPU of a peer's round, ms",
    "CPU at rest, all peers",
)
REST_SECONDS: Final = 5.0
TABLE: Final = Table("moshpit.md", "many-peers", " | ".join(HEAD))


def row(peers: int, mib: float, rounds: int) -> list[str]:
    """The figures of a swarm. Times are since the first process was started."""
    with ExitStack() as stack:
        config: dict[str, Any] = {"join": "", "secret": secrets.token_hex(16), "peers": peers}
        directory = Part("directory_serves", config)
        stack.callback(directory.close)
        config |= directory.answer() | {"values": int(mib * 2**18)}
        begin = time.monotonic()
        parts = [Part("many_peers_peer", {**config, "peer": number}) for number in range(peers)]
        for part in parts:
            stack.callback(part.close)
        started = max(part.answer()["at"] for part in parts) - begin
        joined = max(one["at"] for one in all_of(parts, "join")) - begin
        first = all_of(parts, "rounds", 1)
        after = max(one["at"] for one in first) - begin
        said = all_of(parts, "rounds", rounds)
        rested = all_of(parts, "rest", REST_SECONDS)
        memory = all_of([directory], "figures")[0]["rss"]
    return figures(peers, mib, (started, joined, after), said, rested, memory)


def figures(
    peers: int,
    mib: float,
    times: Sequence[float],
    said: Sequence[dict[str, Any]],
    rested: Sequence[dict[str, Any]],
    memory: float,
) -> list[str]:
    """As the table has them."""
    reports = [report for one in said for report in one["reports"]]
    seconds = [one["seconds"] for one in reports]
    means = [one["mean"] for one in said]
    off = abs(statistics.fmean(means) - (peers - 1) / 2) / peers
    started, joined, after = times
    return [
        f"{peers}",
        f"{mib:g}",
        f"{started:.1f}",
        f"{joined:.1f}",
        f"{after:.1f}",
        f"{statistics.median(seconds):.2f}, {max(seconds):.2f}",
        f"{statistics.fmean(one['members'] for one in reports):.1f}",
        f"{statistics.fmean(one['contributions'] for one in reports):.2f}",
        f"{sum(one['failed'] for one in reports)} of {len(reports)}",
        f"{off:.2%}",
        f"{statistics.median(one['own'] for one in said) / 2**20:.1f}, "
        f"{statistics.median(one['rss'] for one in said) / 2**20:.1f}",
        f"{memory / 2**20:.0f}",
        f"{1e3 * statistics.median(one['cpu'] for one in said):.0f}",
        f"{sum(one['cpu'] for one in rested):.1%}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--peers", type=whole(2), nargs="+", default=[16, 64], help="how many (%(default)s)")
    add("--mib", type=float, nargs="+", default=[1.0], help="of float32 values (%(default)s)")
    add("--rounds", type=whole(1), default=10, help="after the first (%(default)s)")
    add_report(parser, TABLE.page)
    options = parser.parse_args()
    rows = [row(peers, mib, options.rounds) for peers in options.peers for mib in options.mib]
    print(TABLE.report(options.report, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
