"""Deadlines where paths change: ``python -m benchmarks.studies.deadlines --report docs`` (7
minutes).

Needs the laboratory (root, or user namespaces: ``lossycoll lab check``). Each scenario replaces its
entry of the report when it is done; the others stay.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.common.results import commit
from lossycoll.errors import LossyError

from . import report
from .measure import run
from .scenarios import SCENARIOS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.studies.deadlines", description=__doc__
    )
    add = parser.add_argument
    names = [one.name for one in SCENARIOS]
    add("--only", action="append", choices=names, help="only this one; may be repeated")
    add("--redraw", action="store_true", help="runs nothing: table and picture from the JSON")
    add(
        "--report",
        type=Path,
        help="folder of deadlines.md, for the JSON, the table and the picture",
    )
    options = parser.parse_args(arguments)
    if options.redraw and not options.report:
        parser.error("--redraw needs --report FOLDER, where deadlines.json is")
    console = Console(stderr=True, highlight=False)
    entries = report.load(options.report) if options.report else {}
    for scenario in SCENARIOS:
        if options.redraw or scenario.name not in (options.only or names):
            continue
        console.print(f"{scenario.name}: {scenario.title} ...", markup=False)
        try:
            entries[scenario.name] = report.entry(run(scenario), commit("studies/deadlines"))
        except LossyError as error:
            console.print(str(error), markup=False, soft_wrap=True)
            return 1
        if options.report:
            report.write(entries, options.report)
    if options.redraw:
        report.write(entries, options.report)
    print(report.table(list(entries.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
