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

from benchmarks.common.report import plt, save
from benchmarks.common.results import ROOT

COLUMNS = ("scenario", "second", "flow", "mbit", "queue_ms", "overrun", "random")
LINK_MBIT = 1000


def simulate() -> list[dict[str, str]]:
    """One row for each scenario, tenth of a second and flow."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "pace_trace"
        law = [ROOT / "native" / name for name in ("pace.c", "measure.c", "rate.c")]
        sources = [ROOT / "benchmarks" / "micro" / "pace_trace.c", *law]
        flags = ["-std=c11", "-O2", f"-I{ROOT / 'native'}", f"-I{ROOT / 'tests' / 'native'}"]
        command = ["cc", *flags, *map(str, sources), "-lm", "-o", str(program)]
        subprocess.run(command, check=True)
        done = subprocess.run([str(program)], check=True, capture_output=True, text=True)
    return list(csv.DictReader(done.stdout.splitlines(), COLUMNS))


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Three rows of panels: rates, queue, and loss, each over time; a column for each scenario."""
    names = list(dict.fromkeys(row["scenario"] for row in rows))
    size = (4.3 * len(names), 8)
    figure, axes = plt.subplots(3, len(names), figsize=size, layout="constrained", squeeze=False)
    for column, name in enumerate(names):
        found = [row for row in rows if row["scenario"] == name]
        rate, queue, loss = axes[:, column]
        flows = list(dict.fromkeys(row["flow"] for row in found))
        for flow in flows:
            own = [row for row in found if row["flow"] == flow]
            seconds = [float(row["second"]) for row in own]
            rate.plot(seconds, [float(row["mbit"]) for row in own], linewidth=1, label=flow)
            lost = [100 * float(row["overrun"]) for row in own]
            loss.plot(seconds, lost, linewidth=1)
        first = [row for row in found if row["flow"] == flows[0]]
        seconds = [float(row["second"]) for row in first]
        queue.plot(seconds, [float(row["queue_ms"]) for row in first], color="black", linewidth=1)
        rate.axhline(LINK_MBIT, color="grey", linestyle=":")
        rate.set_title(name, fontsize=9)
        rate.set_ylim(0, 1.1 * LINK_MBIT)
        queue.set_ylim(bottom=0)
        loss.set_ylim(bottom=0)
        loss.set_xlabel("seconds")
        if 1 < len(flows) < 5:
            rate.legend(fontsize=8)
    labels = ("delivered, Mbit/s", "queue, ms", "lost to the queue, %")
    for axis, label in zip(axes[:, 0], labels, strict=True):
        axis.set_ylabel(label)
    save(figure, path / "congestion.png", dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs", help="(docs)")
    draw(simulate(), parser.parse_args().folder)


if __name__ == "__main__":
    main()
