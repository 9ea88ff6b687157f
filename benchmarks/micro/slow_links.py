"""Looks for all-reduces that take many times what slow, lossy links need.

``python -m benchmarks.micro.slow_links`` draws scenarios from seeds: 4 hosts with ports of 1 to 100
Mbit/s, 1 to 20% lost, 16 KB to 4 MiB, and runs them in virtual time (tests/native/slow_links.h), so
that the same ones can be run again, one by one: ``--first 17 --count 1 loss=0.05``. It prints how
many operations took so many times their limit, and the worst scenarios.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.results import ROOT
from benchmarks.common.tables import Table, add_report

COLUMNS = (
    *("seed", "hosts", "mbit", "rtt_ms", "queue_ms", "loss", "burst", "capacity"),
    *("bytes", "deep", "pause_ms", "delivery", "limit", "lost", "dropped", "failed", "times"),
)
TIMES = (1.5, 2.0, 3.0, 5.0, 10.0, 20.0)
TABLE = Table(
    "congestion-results.md",
    "slow-links",
    "operations | " + " | ".join(f"over {most:g} times" for most in TIMES) + " | median | failed",
)


@dataclass(frozen=True)
class Run:
    """One scenario, and the time of each of its operations against the limit."""

    settings: dict[str, str]
    times: tuple[float, ...]

    @property
    def worst(self) -> float:
        return max(self.times)

    @classmethod
    def of(cls, line: str) -> Run:
        settings = dict(zip(COLUMNS, line.split(","), strict=True))
        return cls(settings, tuple(map(float, settings.pop("times").split())))


def build(folder: Path) -> Path:
    """The program, with the engine's sources."""
    program = folder / "slow_links"
    sources = [
        ROOT / "benchmarks" / "micro" / "slow_links.c",
        ROOT / "native" / "sim" / "link_memory.c",
        *sorted((ROOT / "native").glob("*.c")),
    ]
    folders = ("native", "native/sim", "tests/native")
    flags = ["-std=gnu11", "-O2", *(f"-I{ROOT / folder}" for folder in folders)]
    command = ["cc", *flags, *map(str, sources), "-lm", "-lpthread", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def simulate(program: Path, first: int, count: int, settings: Sequence[str]) -> list[Run]:
    """Runs the scenarios of some seeds; a setting, as "loss=0.05", holds for all of them."""
    command = [str(program), str(first), str(count), *settings]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [Run.of(line) for line in done.stdout.splitlines()]


def summary(runs: Sequence[Run], worst: int) -> str:
    times = sorted(time for run in runs for time in run.times)
    lines = [f"{len(runs)} scenarios, {len(times)} operations"]
    lines += [
        f"over {most:g} times the limit: {sum(time > most for time in times)}" for most in TIMES
    ]
    lines.append(f"median: {statistics.median(times):.2f} times")
    dropped = statistics.fmean(float(run.settings["dropped"]) for run in runs)
    lines.append(f"dropped where ports' queues were full: {dropped:.1%} of the packets")
    lines.append(f"failed: {sum(int(run.settings['failed']) for run in runs)}")
    for run in sorted(runs, key=lambda run: -run.worst)[:worst]:
        settings = " ".join(f"{name}={value}" for name, value in run.settings.items())
        lines.append(f"{run.worst:.1f}: {settings}")
    return "\n".join(lines)


def cells(runs: Sequence[Run]) -> list[str]:
    """The row of TABLE."""
    times = [time for run in runs for time in run.times]
    return [
        f"{len(times)}",
        *(f"{sum(time > most for time in times)}" for most in TIMES),
        f"{statistics.median(times):.2f}",
        f"{sum(int(run.settings['failed']) for run in runs)}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1, help="seed (%(default)s)")
    parser.add_argument("--count", type=int, default=1000, help="scenarios (%(default)s)")
    parser.add_argument("--worst", type=int, default=10, help="to print (%(default)s)")
    parser.add_argument("settings", nargs="*", help="of all scenarios: name=value")
    add_report(parser, TABLE.page)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        runs = simulate(build(Path(folder)), chosen.first, chosen.count, chosen.settings)
    print(summary(runs, chosen.worst))
    TABLE.report(chosen.report, [cells(runs)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
