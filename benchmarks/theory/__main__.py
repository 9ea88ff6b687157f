"""The theory's figures, measured: python -m benchmarks.theory

Real engines and sockets on loopback, losses injected. Writes docs/theory.json and the plots
docs/theory-*.png, and fills the marks of docs/theory.md; ``--plots`` does so from the figures that
are there, ``--tables`` prints them. The experiments are those of tests/benchmarks/test_theory.py,
with more samples.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.common.results import ROOT, source
from benchmarks.common.tables import fill, write_json

from . import plots, tables
from .measure import PARTS

JSON = ROOT / "docs" / "theory.json"


def measured() -> dict[str, str]:
    """When, by which code and where figures are taken."""
    taken = source("benchmarks/theory", "tests/support")
    return {**taken, "machine": f"{taken['machine']}, loopback"}


def report(found: dict[str, Any], folder: Path) -> None:
    """The plots, and the tables between the marks of theory.md."""
    plots.draw(found, folder)
    fill(folder / "theory.md", tables.marked(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plots", action="store_true", help="draw from the figures that are there")
    parser.add_argument("--tables", action="store_true", help="print the figures that are there")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure only this again")
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(JSON.read_text()) if JSON.exists() else {}
    if not (options.plots or options.tables):
        for name in options.only or PARTS:
            begin = time.monotonic()
            found[name] = PARTS[name]()
            print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
            # Part by part: one that is measured again says nothing of when the others were.
            found.setdefault("measured", {})[name] = measured()
            write_json(JSON, found)
    if options.tables:
        print(tables.text(found))
    else:
        report(found, ROOT / "docs")


if __name__ == "__main__":
    main()
