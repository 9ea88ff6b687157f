"""Flat, ring and by hosts, as simulated: ``python -m benchmarks.theory.algorithms docs``.

Writes algorithms.png, and the table between the marks of simulate-accuracy.md.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.common.pictures import band, plt, save
from benchmarks.common.tables import Table
from lossycoll.lab.network import Link, Network, Port
from lossycoll.options.fields import Options
from lossycoll.simulate.collective import Simulated, simulate_collective

NETWORK = Network(link=Link(delay_ms=5), port=Port(up_mbit=1000, down_mbit=1000, queue_ms=25))
TABLE = Table("simulate-accuracy.md", "algorithms", "axis | algorithm | ms | of limit | missing")
AXES = ("hosts", "size, KiB", "lost, %", "ranks of each of 4 hosts")
"""The limit is the plan's own: flat plans of hosts with several ranks have a larger one, and so the
last of these is drawn in milliseconds."""


@dataclass(frozen=True)
class Case:
    """An all-reduce; ``axis`` is what differs from its neighbours."""

    axis: str
    value: float
    algorithm: str
    hosts: int = 8
    kib: int = 2048
    loss: float = 0.0
    ranks_per_host: int = 1

    def simulated(self) -> Simulated:
        return simulate_collective(
            replace(NETWORK, link=replace(NETWORK.link, loss=self.loss)),
            self.kib << 10,
            hosts=self.hosts,
            ranks_per_host=self.ranks_per_host,
            options=Options(algorithm=self.algorithm),
        )


def cases() -> list[Case]:
    found = []
    for name in ("transpose", "ring"):
        found += [Case(AXES[0], n, name, hosts=n) for n in (2, 4, 8, 16)]
        found += [Case(AXES[1], n, name, hosts=4, kib=n) for n in (64, 256, 1024, 4096)]
        found += [Case(AXES[2], n, name, loss=n / 100) for n in (0, 0.5, 1, 2, 5)]
    for name in ("transpose", "hierarchical"):
        found += [Case(AXES[3], n, name, hosts=4, ranks_per_host=n) for n in (1, 2, 4)]
    return found


def draw(found: dict[Case, Simulated], path: Path) -> None:
    """Medians of the calls, and a band from the fastest to the slowest."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 7), layout="constrained")
    ticks: list[float] = []
    for axis, name in zip(axes.flat, AXES, strict=True):
        for algorithm in ("transpose", "ring", "hierarchical"):
            mine = {
                case.value: [
                    call.ratio if name != AXES[3] else 1e3 * call.seconds for call in one.steady
                ]
                for case, one in found.items()
                if (case.axis, case.algorithm) == (name, algorithm)
            }
            if mine:
                curves = list(zip(*mine.values(), strict=True))
                band(axis, [*mine], curves, algorithm, marker="o")
                ticks = [*mine]
        axis.set(xlabel=name, ylabel="ms" if name == AXES[3] else "time over the limit")
        axis.set_ylim(bottom=0)
        if name in AXES[:2]:
            axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{value:g}" for value in ticks])
        axis.grid(alpha=0.3)
        axis.legend()
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of simulate-accuracy.md")
    folder = parser.parse_args().folder
    found = {case: case.simulated() for case in cases()}
    draw(found, folder / "algorithms.png")
    rows = [
        [
            f"{case.axis}: {case.value:g}",
            case.algorithm,
            f"{1e3 * one.seconds:.0f}",
            f"{one.ratio:.2f}",
            f"{one.missing:.2%}",
        ]
        for case, one in found.items()
    ]
    TABLE.report(folder, rows)


if __name__ == "__main__":
    main()
