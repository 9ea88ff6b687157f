"""Bare UDP sockets with each fast path switched off in turn: python -m benchmarks.micro.raw_udp

What the engine's own switches cost is asked with ``lossycoll bench --disable gso`` and so on;
this is the same question to the kernel alone. ``make benchmarks/build/raw_udp`` builds the
program that does the work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.common.tables import Table, add_report

TABLE = Table(
    "performance.md", "raw-udp", "fast paths | GB/s | least | most | of all on | datagrams lost"
)
PROGRAM = Path(__file__).resolve().parents[1] / "build" / "raw_udp"
FAST_PATHS = ("gso", "gro", "mmsg", "gather", "simd")
CASES: dict[str, tuple[str, ...]] = {
    "all on": (),
    **{f"without {name}": (name,) for name in FAST_PATHS},
    "all off": FAST_PATHS,
}


def measure(off: tuple[str, ...], datagram: int, megabytes: int) -> dict[str, Any]:
    command = [str(PROGRAM), "--datagram", str(datagram), "--megabytes", str(megabytes)]
    command += [f"--no-{name}" for name in off]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="Bare UDP with each fast path off in turn.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=512, help="sent in each round")
    parser.add_argument("--datagram", type=int, default=1448, help="bytes")
    parser.add_argument("--json", action="store_true")
    add_report(parser, TABLE.page)
    options = parser.parse_args()
    if not PROGRAM.exists():
        print("raw_udp is not built: make benchmarks/build/raw_udp", file=sys.stderr)
        return 1
    console = Console(stderr=options.json)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    # Cases take turns, so that a busy moment of the machine does not fall on one alone.
    for _ in track(range(options.rounds), "measuring", console=console):
        for name, off in CASES.items():
            rounds[name].append(measure(off, options.datagram, options.megabytes))
    if options.json:
        print(json.dumps(rounds))
        return 0
    rows = []
    base = statistics.median(run["gb_per_s"] for run in rounds["all on"])
    for name, runs in rounds.items():
        rates = [run["gb_per_s"] for run in runs]
        median = statistics.median(rates)
        numbers = (f"{rate:.2f}" for rate in (median, min(rates), max(rates)))
        lost = sum(run["lost"] for run in runs)
        rows.append([name, *numbers, f"{median / base:.0%}", f"{lost}"])
    print(TABLE.report(options.report, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
