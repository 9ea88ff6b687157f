"""How fast parity is made, and packets brought back: python -m benchmarks.micro.parity

Compiles tests/native/bench_gf.c with the engine's flags and runs it on one core: packets of 1,448
bytes at odd addresses, in windows of 1,024 with 16 sets interleaved. GB/s are of data, encoded into
m rows or restored from as many rows as are missing. isa-l's streaming operation stands beside,
where libisal.so.2 is installed (Debian: libisal2).
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common.results import ROOT, source
from benchmarks.common.tables import fill_and_keep, markdown
from lossycoll.cli.argtypes import real

GOAL_ROWS, GOAL = 4, 3.0
"""GB/s of a core that are wanted of the fastest variant, encoding that many rows."""
FLAGS = ("-std=c11", "-O3", "-fno-math-errno")
Speeds = dict[tuple[str, str, int], float]
"""GB/s by variant, what is done, and rows."""


def measure(seconds: float) -> Speeds:
    """Each figure is the best of some tries, of at least so many seconds of the core."""
    tests, native = ROOT / "tests" / "native", ROOT / "native"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "bench_gf"
        command = ["cc", *FLAGS, f"-I{native}", str(tests / "bench_gf.c"), str(native / "rs.c")]
        subprocess.run([*command, "-ldl", "-o", str(program)], check=True)
        done = subprocess.run(
            [str(program), str(seconds)], check=True, capture_output=True, text=True, timeout=300
        )
    lines = [row for row in csv.reader(done.stdout.splitlines()) if len(row) == 4]
    return {(variant, what, int(rows)): float(speed) for variant, what, rows, speed in lines}


def shown(speeds: Speeds) -> tuple[list[str], list[list[str]]]:
    """A head, and a row for each variant and what it does."""
    rows = sorted({m for _, _, m in speeds})
    lines = dict.fromkeys((variant, what) for variant, what, _ in speeds)
    body = [
        [variant, what, *(f"{speeds[variant, what, m]:.2f}" for m in rows)]
        for variant, what in lines
    ]
    return ["variant", "", *(f"m = {m}" for m in rows)], body


def verdict(speeds: Speeds) -> str:
    """Whether the fastest variant of ours reaches the goal."""
    own = [key for key in speeds if key[0] != "isa-l"]
    best = max((speeds[key], key[0]) for key in own if key[1:] == ("encode", GOAL_ROWS))
    reached = "reached" if best[0] >= GOAL else "missed"
    return (
        f"Goal: {GOAL:g} GB/s a core at m = {GOAL_ROWS}, {reached} ({best[1]}: {best[0]:.1f} GB/s)."
    )


def report(folder: Path, speeds: Speeds) -> None:
    """The table between the marks of parity-speed.md."""
    taken = source("tests/native/bench_gf.c")
    when = f"{taken['date']}, commit {taken['commit']}, {taken['machine']}."
    text = "\n\n".join([when, markdown(*shown(speeds)), verdict(speeds)])
    fill_and_keep(folder / "parity-speed.md", "parity-speed", text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=real(0), default=0.02, help="of a try (%(default)g)")
    parser.add_argument("--report", type=Path, help="folder of parity-speed.md, for the table")
    options = parser.parse_args(arguments)
    speeds = measure(options.seconds)
    head, body = shown(speeds)
    table = Table(title="Parity, GB/s of data on one core")
    for heading in head:
        table.add_column(heading, justify="right" if heading.startswith("m") else "left")
    for line in body:
        table.add_row(*line)
    Console(width=100).print(table, verdict(speeds))
    if options.report:
        report(options.report, speeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
