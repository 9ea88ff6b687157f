"""Draws the control law over time on simulated paths: ``python -m benchmarks.micro.congestion
docs``.

The simulation (tests/native/pace_sim.h) is compiled with the law itself (native/pace.c) and depends
on nothing of the machine: the picture is the same wherever it is made.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import tempfile
from pathlib import Path

from benchmarks.common.pictures import plt, save
from benchmarks.common.results import ROOT

COLUMNS = ("scenario", "second", "flow", "mbit", "queue_ms", "overrun", "random")
SHOWN = (
    "two flows; 20 ms; 1% lost",
    "beside TCP (Reno); 20 ms; a buffer of 20 ms",
    "8 ms becomes 80 ms after 4 s; 1% lost",
    "seven to one; 1.5 ms; a buffer of 20 ms",
)
LINK_MBIT = 1000
QUEUE_MS = 60
"""Of the axis."""


def simulate() -> list[dict[str, str]]:
    """One row for each scenario, tenth of a second and flow."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "pace_trace"
        law = [ROOT / "native" / name for name in ("pace.c", "measure.c", "rate.c")]
        sources = [ROOT / "benchmarks" / "micro" / "pace_trace.c", *law]
        flags = [
            "-std=c11",
            "-O2",
            f"-I{ROOT / 'native'}",
            f"-I{ROOT / 'native' / 'sim'}",
            f"-I{ROOT / 'tests' / 'native'}",
        ]
        command = ["cc", *flags, *map(str, sources), "-lm", "-o", str(program)]
        subprocess.run(command, check=True)
        done = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    return list(csv.DictReader(done.stdout.splitlines(), COLUMNS))


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """A panel for each of four scenarios: the rate of each flow, and the queue, over time."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for rate, name in zip(axes.flat, SHOWN, strict=True):
        found = [row for row in rows if row["scenario"] == name]
        flows = list(dict.fromkeys(row["flow"] for row in found))
        for flow in flows:
            own = [row for row in found if row["flow"] == flow]
            seconds = [float(row["second"]) for row in own]
            rate.plot(seconds, [float(row["mbit"]) for row in own], linewidth=1.2, label=flow)
        queue = rate.twinx()
        first = [row for row in found if row["flow"] == flows[0]]
        seconds = [float(row["second"]) for row in first]
        queue.plot(seconds, [float(row["queue_ms"]) for row in first], color="black", linewidth=0.8)
        queue.set_ylim(0, QUEUE_MS)
        queue.set_ylabel("queue (black), ms")
        rate.axhline(LINK_MBIT, color="grey", linestyle=":", label="the link's rate")
        rate.set(
            title=name, ylim=(0, 1.4 * LINK_MBIT), xlabel="seconds", ylabel="delivered, Mbit/s"
        )
        rate.legend(fontsize=7, loc="upper center", ncols=4)
    save(figure, path / "congestion.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs", help="(docs)")
    draw(simulate(), parser.parse_args().folder)


if __name__ == "__main__":
    main()
