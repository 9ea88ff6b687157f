"""All-reduce on bad wires: ``python -m benchmarks.studies.lossy_links --report docs``.

Needs the laboratory (root, or user namespaces: ``lossycoll lab check``). Cells of one network are
measured in one job.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.common import runner
from benchmarks.common.results import Result
from benchmarks.common.runner import Study, batch_by_batch

from .cells import Cell, cells
from .measure import measure


def arguments(parser: argparse.ArgumentParser) -> None:
    help_rounds = "of the lossy variant; the others have fewer in proportion"
    parser.add_argument("--rounds", type=int, help=help_rounds)


def by_network(left: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    for _, group in groupby(left, key=lambda cell: cell.network):
        yield list(group)


def report(results: Sequence[Result], folder: Path) -> None:
    from .report import write

    write(results, folder)


STUDY = Study(
    name="lossy_links",
    description=__doc__,
    arguments=arguments,
    plan=lambda options: list(cells()),
    batches=by_network,
    measuring=batch_by_batch(measure),
    report=report,
    report_help="folder of performance.md, for the table, wire.json and wire.png",
)


def main(arguments: Sequence[str] | None = None) -> int:
    return runner.main(STUDY, arguments)


if __name__ == "__main__":
    sys.exit(main())
