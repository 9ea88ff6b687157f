"""Tables of simulations, the same on every machine: python -m benchmarks.theory.simulated docs

Ring and transpose by hosts, size and loss, and ranks that wake late, for simulate-accuracy.md; the
control plane of large jobs for simulate.md. Some minutes on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.common.tables import Table
from benchmarks.studies.simulation.study import GAP, Cell
from lossycoll.lab.network import Link, Network, Port
from lossycoll.options.fields import Options
from lossycoll.simulate.collective import Simulated, simulate_collective
from lossycoll.simulate.control import simulate_control

SLOW: Final = Network(port=Port(up_mbit=100, down_mbit=100), seed=3)
LOSSES: Final = (0.0, 0.01, 0.1)
SIZES: Final[Mapping[int, Sequence[int]]] = {
    2: (64, 1024, 4096, 25 * 1024),
    3: (64, 1024, 4096, 25 * 1024),
    4: (64, 1024, 4096),
    8: (64, 1024, 4096),
    16: (64, 1024, 4096),
}
"""KiB by hosts."""
RINGS: Final = Table("simulate-accuracy.md", "rings", "hosts | size | nothing lost | 1% | 10%")
WAKES: Final = (None, 0.002, 0.004)
LATE: Final = (
    Cell(4, 50, 10, 4, pacing="path"),
    Cell(3, 50, 10, 4, pacing="path"),
    Cell(4, 50, 5, 4, queue_ms=10, algorithm="ring", pacing="path"),
    Cell(4, 50, 10, 4, policer_ms=25, pacing="path"),
    Cell(4, 50, 10, 4, pacing="port"),
)
WAKING: Final = Table("simulate-accuracy.md", "wake", "network | pacing | usual | 2 ms | 4 ms")
JOBS: Final = ((256, 10.0), (1000, 10.0), (4096, 10.0), (10_000, 60.0))
"""Ranks, and liveness in seconds."""
CONTROL: Final = Table(
    "simulate.md",
    "control",
    "ranks | liveness | start | a process ends | a host falls silent"
    " | all follow the next coordinator | heartbeats in a second | descriptors, memory",
    dated=False,
)


def rings() -> tuple[list[list[str]], str]:
    """Milliseconds of transpose and ring, and what is missing; and how often the ring is faster."""
    rows, ratios = [], []
    for hosts, kib in [(hosts, kib) for hosts, sizes in SIZES.items() for kib in sizes]:
        cells = []
        for loss in LOSSES:
            network = replace(SLOW, link=Link(delay_ms=10, loss=loss))
            both = [
                simulate_collective(
                    network, kib << 10, hosts=hosts, options=Options(algorithm=name)
                )
                for name in ("transpose", "ring")
            ]
            missing = ", ".join(f"{one.missing:.1%}" for one in both)
            times = ", ".join(f"{1e3 * one.seconds:.0f}" for one in both)
            cells.append(f"{times} ({missing})" if loss else times)
            if hosts > 2:
                ratios.append(both[1].seconds / both[0].seconds)
        rows.append([f"{hosts}", f"{kib} KiB" if kib < 1024 else f"{kib >> 10} MiB", *cells])
    return rows, (
        f"With three hosts and more the ring is faster in {sum(one < 1 for one in ratios)} of "
        f"{len(ratios)} cells, by {1 - min(ratios):.0%} at most, and takes up to "
        f"{max(ratios):.0f} times as long in the others."
    )


def late() -> tuple[list[list[str]], str]:
    """Times and what is missing, by how long ranks rest between turns."""

    def found(cell: Cell, grain: float | None) -> Simulated:
        options = Options(algorithm=cell.algorithm, pacing=cell.pacing)
        size = int(cell.mib * (1 << 20))
        return simulate_collective(
            cell.network, size, options=options, calls=9, gap=GAP, grain=grain
        )

    rows = []
    for cell in LATE:
        times = (
            f"{1e3 * one.seconds:.0f} ms, {one.missing:.2%}"
            for one in (found(cell, grain) for grain in WAKES)
        )
        rows.append([cell.name, cell.pacing, *times])
    return rows, ""


def control() -> tuple[list[list[str]], str]:
    """What a coordinator does, by ranks."""
    rows = []
    for ranks, liveness in JOBS:
        found = simulate_control(ranks, liveness=liveness)
        rows.append(
            [
                f"{ranks:,}",
                f"{liveness:g} s",
                f"{found.ready:.2g} s",
                f"{1e3 * found.ended.last:.0f} ms",
                f"{found.silent.last:.2g} s",
                f"{found.followed:.2g} s",
                f"{found.messages:,.0f}, {found.busy:.1%} of a processor",
                f"{found.descriptors:,}, {found.memory / 1e6:.0f} MB",
            ]
        )
    return rows, ""


TABLES: Final[Mapping[Table, Callable[[], tuple[list[list[str]], str]]]] = {
    RINGS: rings,
    WAKING: late,
    CONTROL: control,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [table.name for table in TABLES]
    parser.add_argument("folder", type=Path, help="of the pages")
    parser.add_argument("--only", choices=names, help="write this alone")
    options = parser.parse_args()
    for table, rows in TABLES.items():
        if options.only in (None, table.name):
            print(table.report(options.folder, *rows()), "\n", flush=True)


if __name__ == "__main__":
    main()
