"""What sealing costs: python -m benchmarks.micro.sealed

Groups that seal nothing, encrypt, and authenticate take turns in the same two processes, over the
laboratory's wires (docs/lab.md says what it needs) and over loopback, all by UDP at one MTU. A time
is from the last rank's begin to the last one's end; medians. With LOSSYCOLL_LIBCRYPTO another
OpenSSL than the system's seals, which ``--mark sealed-newer`` reports in a place of its own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.common import lab_job, local_job
from benchmarks.common.rank_kit import between_ranks
from benchmarks.common.results import source
from benchmarks.common.tables import fill_and_keep, markdown
from benchmarks.micro.sealed_rank import WAYS
from lossycoll.cli.argtypes import human, whole
from lossycoll.lab import Lab, Link, Network, Port
from lossycoll.options.fields import Options
from lossycoll.runtime.keys.aead import library

MODULE: Final = "benchmarks.micro.sealed_rank"
RANKS: Final = 2
SMALL, LARGE = 4096, 25 << 20
LEFT_OUT: Final = 1 / 3
"""Of each turn: the first calls find the path's rate."""
MTU: Final = 1500
QUEUE_MS, DELAY_MS = 25.0, 0.1
JOB_SECONDS: Final = 900.0
WIRES: Final[Mapping[str, float]] = {"1 Gbit/s": 1e3, "10 Gbit/s": 1e4, "loopback": 0.0}
"""Mbit/s of a host's port; 0: no laboratory."""
GOALS: Final = {"1 Gbit/s": 0.95, "10 Gbit/s": 0.6, "loopback": 0.5}
"""Of the plain group's bandwidth, at LARGE."""
SMALL_GOAL: Final = 1.15
"""Times the plain group's time, at SMALL."""
HEADINGS: Final = ("wire", "size", *(f"{way}, ms" for way in WAYS), "encrypted", "goal")


@dataclass(frozen=True)
class Measured:
    """Seconds of a call, the median, by way."""

    wire: str
    size: int
    seconds: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """The plain group's time, as a share of the encrypting one's."""
        return self.seconds["plain"] / self.seconds["encrypt"]

    @property
    def goal(self) -> float:
        """The least ratio that is wanted."""
        return GOALS[self.wire] if self.size == LARGE else 1 / SMALL_GOAL


def over_lab(config: Mapping[str, Any], mbit: float) -> list[list[dict[str, Any]]]:
    """What each rank has measured on a host of its own."""
    network = Network(
        hosts=RANKS,
        link=Link(delay_ms=DELAY_MS),
        port=Port(up_mbit=mbit, down_mbit=mbit, queue_ms=QUEUE_MS),
    )
    with Lab(network) as lab:
        return lab_job.run_job(lab, MODULE, config, JOB_SECONDS)


def over_loopback(config: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
    """What each rank has measured."""
    events = local_job.run_job(MODULE, config, RANKS)
    return [one["found"] for one in sorted(events, key=lambda event: int(event["rank"]))]


def medians(
    wire: str, ranks: Sequence[Sequence[Mapping[str, Any]]], from_nth: int
) -> list[Measured]:
    """``ranks``: what each has measured, in order; calls before ``from_nth`` of a turn don't
    count."""
    times: dict[tuple[int, str], list[float]] = {}
    for row in zip(*ranks, strict=True):
        if row[0]["nth"] >= from_nth:
            key = row[0]["size"], row[0]["way"]
            times.setdefault(key, []).append(between_ranks([one["time"] for one in row]))
    sizes = sorted({size for size, _ in times})
    return [
        Measured(wire, size, {way: statistics.median(times[size, way]) for way in WAYS})
        for size in sizes
    ]


def cells(found: Sequence[Measured]) -> list[list[str]]:
    """A row for each measurement, under HEADINGS."""
    return [
        [
            one.wire,
            human(one.size),
            *(f"{1e3 * one.seconds[way]:.3g}" for way in WAYS),
            f"{one.ratio:.2f} of plain",
            f"{one.goal:.2f}" + ("" if one.ratio >= one.goal else ", missed"),
        ]
        for one in found
    ]


def measure(wire: str, options: argparse.Namespace) -> list[Measured]:
    """Raises LossyError where a rank fails."""
    found = []
    for size, rounds, each in (
        (LARGE, options.rounds, options.each),
        (SMALL, options.rounds, 20 * options.each),
    ):
        config = {"mtu": MTU, "sizes": [size], "rounds": rounds, "each": each}
        mbit = WIRES[wire]
        ranks = over_lab(config, mbit) if mbit else over_loopback(config)
        found += medians(wire, ranks, int(each * LEFT_OUT))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--wire", choices=list(WIRES), action="append", help="(all)")
    parser.add_argument("--rounds", type=whole(1), default=6, help="turns (%(default)s)")
    parser.add_argument("--each", type=whole(2), default=9, help="in a row (%(default)s)")
    parser.add_argument(
        "--report", type=Path, help="write the table into performance.md of this folder"
    )
    parser.add_argument("--mark", default="sealed", help="where in the page (%(default)s)")
    options = parser.parse_args()
    found: list[Measured] = []
    for wire in options.wire or WIRES:
        found += measure(wire, options)
        print(*cells(found)[-2:], sep="\n", file=sys.stderr, flush=True)
    table = Table(*HEADINGS, title=f"All-reduce, {RANKS} ranks, UDP, MTU {MTU}")
    for row in cells(found):
        table.add_row(*row)
    Console(width=110).print(table)
    if options.report:
        taken = source()
        seals = library(Options.from_env().libcrypto)[0]
        when = f"{taken['date']}, commit {taken['commit']}, {taken['machine']}; {seals}."
        text = f"{when}\n\n{markdown(HEADINGS, cells(found))}"
        fill_and_keep(options.report / "performance.md", options.mark, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
