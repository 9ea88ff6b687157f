"""Writes every table and picture of docs/ again: ``python -m benchmarks.reports [DIR]``.

It measures nothing. Studies keep their results beside them, and other measurements a JSON file in
docs/. Where only a table was kept, docs/tables.json has its text.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.__main__ import main as study
from benchmarks.common.results import ROOT, Result
from benchmarks.common.tables import fill, kept
from benchmarks.micro import gpu, gpu_lab, one_host, report_picture
from benchmarks.studies.fec import report as fec
from benchmarks.studies.nccl import report as nccl
from benchmarks.theory import __main__ as theory
from benchmarks.theory import dropcompute, moshpit
from examples import run as examples

STUDIES: Final[Mapping[str, tuple[str, ...]]] = {
    "quality": (),
    "large": (),
    "lossless": (),
    "lossy_links": (),
    "arc_topk": (),
    "fairness": (),
    "deadlines": (),
    "dropcompute": (),
    "drop_rates": (),
    "phases": (),
    "swarm": (),
    "swarm/preempted": (),
    "few_bytes": (),
    "time_to_loss": (),
    "folding": (),
    "simulation": (),
}
"""Options by study: of which results its page speaks."""
OF_FILES: Final[Mapping[str, Callable[[Any, Path], object]]] = {
    "theory": theory.report,
    "moshpit": moshpit.report,
    "dropcompute-theory": dropcompute.report,
    "gpu": gpu.report,
    "gpu-lab": gpu_lab.report,
    "one-host": one_host.report,
    "fec": fec.report,
    "examples": examples.report,
    "nccl": lambda found, folder: nccl.write([Result(**row) for row in found], folder),
}
"""What writes the tables and pictures of a JSON file of docs/."""


def write(folder: Path) -> int:
    """Everything, into the pages of a folder such as docs, and into README.md beside it; returns
    the exit status."""
    for page, tables in kept(ROOT / "docs").items():
        fill(folder / page, {name: "\n".join(lines) for name, lines in tables.items()})
    for name, report in OF_FILES.items():
        report(json.loads((ROOT / "docs" / f"{name}.json").read_text(encoding="utf-8")), folder)
    report_picture.draw(ROOT / "docs" / "report.jsonl", folder / "report.png")
    done = [
        study([name, "--report", str(folder), "--report-only", *options])
        for name, options in STUDIES.items()
    ]
    return max(done)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "docs", metavar="DIR")
    sys.exit(write(parser.parse_args().folder))
