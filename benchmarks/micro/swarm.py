"""A swarm's rounds and newcomers in a network that loses packets: python -m benchmarks.micro.swarm

Prints markdown tables: seconds of rounds beside what the links allow, and until a newcomer has the
state of peers that are in the middle of training. With --slow, rounds of four peers of which one
has a fifth of the others' rate. Needs the laboratory (docs/lab.md).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any, Final

from benchmarks.common.lab_job import run_job
from benchmarks.common.tables import Table, add_report
from lossycoll.cli.argtypes import whole
from lossycoll.lab import Lab, Link, Network, Port
from lossycoll.plan.owners import fractions

ROUNDS: Final = Table(
    "moshpit.md",
    "swarm-rounds",
    "peers | round of | limit, ms | median, ms | of it | longest | group formed in, ms"
    " | contributions",
    keys=2,
)
NEWCOMER: Final = Table(
    "moshpit.md",
    "swarm-newcomer",
    "peers | state of | until it trains, s | tries | MiB that came"
    " | others' steps, ms: median, longest",
    keys=2,
)
OWNERS: Final = Table(
    "moshpit.md",
    "owners",
    "owners | wire | parts | limit, ms | median, ms | longest | contributions",
)
DELAY_MS, LOSS, MBIT = 20.0, 0.01, 1000.0
SLOWER: Final = 5
JOB_SECONDS: Final = 400.0


def measure(part: str, hosts: int, mib: float, rounds: int, mbit: float) -> list[Any]:
    """What each peer saw: see swarm_rank."""
    network = Network(
        hosts=hosts,
        link=Link(delay_ms=DELAY_MS, loss=LOSS),
        port=Port(up_mbit=mbit, down_mbit=mbit),
    )
    config = {"part": part, "mib": mib, "rounds": rounds}
    with Lab(network) as lab:
        return run_job(lab, "benchmarks.micro.swarm_rank", config, JOB_SECONDS)


def limit(hosts: int, mib: float, mbit: float) -> float:
    """Seconds: bytes over rate and a one-way delay for each of two phases, without headers."""
    bits = 8 * mib * 2**20 * 2 * (hosts - 1) / hosts
    return bits / (mbit * 1e6) + 2 * DELAY_MS / 1e3


def row_of_rounds(hosts: int, mib: float, count: int, mbit: float) -> list[str]:
    """From the last peer's begin to the last one's end, but of the first third of the rounds."""
    peers = measure("rounds", hosts, mib, count, mbit)
    seconds, waited, contributions = [], [], []
    for one in list(zip(*peers, strict=True))[count // 3 :]:
        begins = max(peer["begins"] for peer in one)
        seconds.append(max(peer["ends"] for peer in one) - begins)
        # Whoever was ready last waits for the group alone.
        waited.append(min(peer["waited"] for peer in one))
        contributions.append(statistics.mean(peer["contributions"] for peer in one))
    least = limit(hosts, mib, mbit)
    middle = statistics.median(seconds)
    return [
        f"{hosts}",
        f"{mib:g} MiB, {mbit:g} Mbit/s",
        f"{1e3 * least:.0f}",
        f"{1e3 * middle:.0f}",
        f"{middle / least:.2f}",
        f"{1e3 * max(seconds):.0f}",
        f"{1e3 * statistics.median(waited):.1f}",
        f"{statistics.mean(contributions):.2f}",
    ]


def row_of_newcomer(hosts: int, mib: float) -> list[str]:
    """The others' longest step shows whether they stopped."""
    *others, new = measure("newcomer", hosts, mib, 0, MBIT)
    steps = [step for peer in others for step in peer["steps"]]
    return [
        f"{hosts - 1}",
        f"{mib:g} MiB",
        f"{new['all']:.2f}",
        f"{new['tries']}",
        f"{new['bytes'] / 2**20:.1f}",
        f"{1e3 * statistics.median(steps):.0f}, {1e3 * max(steps):.0f}",
    ]


def rows_of_slow(mib: float, count: int, mbit: float) -> list[list[str]]:
    """Four peers, of which the last one's link is slow: with equal parts, with those of their
    links, and with them in int8."""
    bytes_per_s = [mbit * 1e6 / 8] * 3 + [mbit * 1e6 / 8 / SLOWER]
    network = Network(
        hosts=4,
        link=Link(delay_ms=2),
        port=Port(up_mbit=mbit, down_mbit=mbit, queue_ms=50),
        ports={3: Port(up_mbit=mbit / SLOWER, down_mbit=mbit / SLOWER, queue_ms=50)},
    )
    rows = []
    for label, said, wire in (
        ("equal parts", [0] * 4, "same"),
        ("by bandwidth", bytes_per_s, "same"),
        ("equal parts", [0] * 4, "int8"),
        ("by bandwidth", bytes_per_s, "int8"),
    ):
        parts = fractions([int(rate) or 1 for rate in said])
        config = {"part": "rounds", "mib": mib, "rounds": count, "bandwidth": said, "wire": wire}
        with Lab(network) as lab:
            peers = run_job(lab, "benchmarks.micro.swarm_rank", config, JOB_SECONDS)
        by_round = [{one["round"]: one for one in peer if one["members"] == 4} for peer in peers]
        common = sorted(set.intersection(*map(set, by_round)))[count // 3 :]
        late = [[peer[number] for peer in by_round] for number in common]
        seconds = [
            max(peer["ends"] for peer in one) - max(peer["begins"] for peer in one) for one in late
        ]
        bits = 8.31 / 32 if wire == "int8" else 1.0
        least = bits * max(
            mib * 2**20 * float(1 + 2 * part) / rate
            for part, rate in zip(parts, bytes_per_s, strict=True)
        )
        contributions = statistics.mean(peer["contributions"] for one in late for peer in one)
        rows.append(
            [
                label,
                wire,
                ", ".join(f"{float(part):.2f}" for part in parts),
                f"{1e3 * least:.0f}",
                f"{1e3 * statistics.median(seconds):.0f}",
                f"{1e3 * max(seconds):.0f}",
                f"{contributions:.2f}",
            ]
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--hosts", type=whole(2), default=8, help="peers (%(default)s)")
    add("--rounds", type=whole(3), default=12, help="of averaging (%(default)s)")
    add("--mib", type=float, default=25.0, help="values of a round, and a state (%(default)s)")
    add("--mbit", type=float, default=MBIT, help="each host's rate in rounds (%(default)s)")
    add("--slow", action="store_true", help="one of four peers has a slow link: nothing else")
    add_report(parser, "moshpit.md")
    options = parser.parse_args()
    if options.slow:
        rows = rows_of_slow(options.mib, options.rounds, options.mbit)
        print(OWNERS.report(options.report, rows))
        return 0
    print(f"{DELAY_MS:g} ms one way, {LOSS:.0%} of packets lost.\n")
    row = row_of_rounds(options.hosts, options.mib, options.rounds, options.mbit)
    print(ROUNDS.report(options.report, [row]), "\n")
    row = row_of_newcomer(options.hosts, options.mib)
    print(NEWCOMER.report(options.report, [row]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
