"""What folding costs in truth: ``python -m benchmarks folding --report docs``.

The same calls with all hosts simulated, and with some of them that stand for all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.results import Piece, Result
from benchmarks.common.runner import Study, one_by_one
from benchmarks.common.tables import markdown, publish
from lossycoll.lab.network import Link, Network, Port
from lossycoll.lab.profiles import profile
from lossycoll.options.fields import Options
from lossycoll.simulate.collective import simulate_collective

CALLS = 7
KIB_PER_HOST = 128
"""Of the buffer: streams of some 90 packets, as of 8 MiB among 64 hosts."""
PORT = Port(up_mbit=100, down_mbit=100, queue_ms=25)
NETWORKS = {
    "clean": Network(link=Link(delay_ms=10), port=PORT),
    "1% lost": Network(link=Link(delay_ms=10, loss=0.01), port=PORT),
    "queue of 5 ms": Network(
        link=Link(delay_ms=2), port=Port(up_mbit=100, down_mbit=100, queue_ms=5)
    ),
    "cross-dc": profile("cross-dc"),
}


@dataclass(frozen=True)
class Cell(Piece):
    """An all-reduce, and how many hosts of it are simulated."""

    hosts: int
    whole: int
    algorithm: str
    network: str


def cells(hosts: Sequence[int], whole: Sequence[int]) -> list[Cell]:
    return [
        Cell(all_hosts, some, algorithm, network)
        for all_hosts in hosts
        for algorithm in ("transpose", "ring")
        for network in NETWORKS
        for some in sorted({*whole, all_hosts})
        if some <= all_hosts
    ]


def measure(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    del options
    begin = time.process_time()
    found = simulate_collective(
        NETWORKS[cell.network],
        cell.hosts * KIB_PER_HOST << 10,
        hosts=cell.hosts,
        whole=cell.whole,
        calls=CALLS,
        options=Options(algorithm=cell.algorithm),
    )
    return {
        "seconds": [call.seconds for call in found.steady],
        "missing": [call.missing for call in found.steady],
        "cpu": time.process_time() - begin,
    }


def compared(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row for each fold whose hosts were all simulated as well."""
    known = {Cell.of(one.settings): one.figures for one in results}
    rows = []
    for cell, found in known.items():
        truth = known.get(Cell(cell.hosts, cell.hosts, cell.algorithm, cell.network))
        if cell.whole < cell.hosts and truth is not None:
            time_of = [statistics.median(one["seconds"]) for one in (found, truth)]
            missing = [statistics.fmean(one["missing"]) for one in (found, truth)]
            rows.append(
                {
                    **asdict(cell),
                    "whole_ms": 1e3 * time_of[1],
                    "folded_ms": 1e3 * time_of[0],
                    "error": time_of[0] / time_of[1] - 1,
                    "missing": missing[::-1],
                    "cpu": [truth["cpu"], found["cpu"]],
                }
            )
    return sorted(rows, key=lambda row: (row["whole"], row["algorithm"] == "ring", row["hosts"]))


def report(results: Sequence[Result], folder: Path) -> None:
    """Write folding.json, and the table between the marks of simulate-accuracy.md."""
    rows = compared(results)
    head = ["hosts, simulated", "algorithm", "network", "all, ms", "folded, ms", "error"]
    head += ["missing", "folded"]
    text = {"folding": markdown(head, [line(row) for row in rows])}
    publish(folder, "folding", rows, "simulate-accuracy.md", text)


def line(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['hosts']}, {row['whole']}",
        row["algorithm"],
        row["network"],
        f"{row['whole_ms']:.0f}",
        f"{row['folded_ms']:.0f}",
        f"{row['error']:+.1%}",
        *(f"{share:.2%}" for share in row["missing"]),
    ]


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hosts", type=int, nargs="+", default=[8, 16, 32, 64], help="in all (%(default)s)")
    add("--whole", type=int, nargs="+", default=[8], help="of them simulated (%(default)s)")


STUDY = Study(
    name="folding",
    description=__doc__,
    arguments=arguments,
    plan=lambda options: cells(options.hosts, options.whole),
    measuring=one_by_one(measure),
    report=report,
    report_help="folder of simulate-accuracy.md, for the table and folding.json",
)
