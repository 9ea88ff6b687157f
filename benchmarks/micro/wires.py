"""All-reduce in few bits over a slow link: python -m benchmarks.micro.wires

Two hosts in the laboratory (docs/lab.md says what it needs). All wires take turns, several
operations each, of which the first aren't counted: they find the path's rate. A time is from the
last rank's begin to the last one's end. It stands beside what the link allows: the bytes that a
rank has sent, at its rate, and a one-way delay for each of two phases.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.common import tables
from benchmarks.common.lab_job import run_job
from benchmarks.common.rank_kit import between_ranks
from lossycoll.cli.argtypes import real, whole
from lossycoll.lab import Lab, Link, Network, Port

QUEUE_MS = 25.0
LEFT_OUT = 1 / 3
"""Of each row: the first operations find the path's rate."""
JOB_SECONDS = 1200.0
SPIKES: Final = {"wire_group": 32, "wire_spikes": 1}
WIRES: Final[dict[str, dict[str, Any]]] = {
    "float32": {},
    "bf16": {"wire": "bf16"},
    "int8": {"wire": "int8"},
    "int6": {"wire": "int6"},
    "int5": {"wire": "int5"},
    "int4/int8": {"wire": "int4/int8"},
    "int4": {"wire": "int4"},
    "int4, groups of 32": {"wire": "int4", "wire_group": 32},
    "int4, stochastic": {"wire": "int4", "wire_rounding": "stochastic"},
    "int3, 32, spikes": {"wire": "int3", **SPIKES},
    "int2, 32, spikes": {"wire": "int2", **SPIKES},
}
HEADINGS: Final = ("wire", "MB sent", "median, ms", "limit", "of it", "times float32's speed")
TABLE: Final = tables.Table("performance.md", "wires", " | ".join(HEADINGS))


@dataclass(frozen=True)
class Measured:
    """A wire: seconds of each operation that counts, and the bytes that a rank sends in one."""

    wire: str
    seconds: list[float]
    sent: float


def limit(options: argparse.Namespace, sent: float) -> float:
    """Seconds for so many bytes of each rank."""
    rate: float = options.mbit * 125_000
    ways: float = 2 * options.delay_ms / 1e3
    return sent / rate + ways


def measure(options: argparse.Namespace, wires: Mapping[str, Mapping[str, Any]]) -> list[Measured]:
    """Raises LossyError where a rank fails."""
    network = Network(
        hosts=2,
        link=Link(delay_ms=options.delay_ms),
        port=Port(up_mbit=options.mbit, down_mbit=options.mbit, queue_ms=QUEUE_MS),
    )
    how = {"mib": options.mib, "wires": wires, "rounds": options.rounds, "each": options.each}
    with Lab(network) as lab:
        ranks = run_job(lab, "benchmarks.micro.wires_rank", how, JOB_SECONDS)
        unasked = sum(host.unasked for host in lab.counters().hosts)
    if unasked:
        print(f"{unasked} packets were lost by the laboratory itself", file=sys.stderr)
    return [of_wire(name, ranks, int(options.each * LEFT_OUT)) for name in wires]


def of_wire(wire: str, ranks: Sequence[Sequence[Mapping[str, Any]]], from_nth: int) -> Measured:
    """``ranks``: what each has measured, in order; operations before ``from_nth`` don't count."""
    rows = [
        row for row in zip(*ranks, strict=True)
        if row[0]["wire"] == wire and row[0]["nth"] >= from_nth
    ]  # fmt: skip
    return Measured(
        wire,
        [between_ranks([one["time"] for one in row]) for row in rows],
        statistics.mean(max(one["sent"] for one in row) for row in rows),
    )


def cells(options: argparse.Namespace, found: Sequence[Measured]) -> list[list[str]]:
    """A row for each wire, under HEADINGS."""
    usual = statistics.median(found[0].seconds)
    rows = []
    for one in found:
        median, least = statistics.median(one.seconds), limit(options, one.sent)
        numbers = (f"{1e3 * median:.1f}", f"{1e3 * least:.1f}", f"{median / least:.2f}")
        rows.append([one.wire, f"{one.sent / 1e6:.2f}", *numbers, f"{usual / median:.2f}"])
    return rows


def described(options: argparse.Namespace) -> str:
    return (
        f"All-reduce of {options.mib:g} MiB of float32, 2 hosts, {options.mbit:g} Mbit/s, "
        f"{2 * options.delay_ms:g} ms there and back"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=real(0.001), default=25.0, help="(%(default)g)")
    parser.add_argument("--mbit", type=real(1), default=1000.0, help="(%(default)g)")
    parser.add_argument("--delay-ms", type=real(0), default=0.1, help="one way (%(default)g)")
    parser.add_argument("--rounds", type=whole(1), default=4, help="turns (%(default)s)")
    parser.add_argument("--each", type=whole(2), default=9, help="in a row (%(default)s)")
    tables.add_report(parser, TABLE.page)
    options = parser.parse_args()
    rows = cells(options, measure(options, WIRES))
    table = Table(*HEADINGS, title=described(options))
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)
    TABLE.report(options.report, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
