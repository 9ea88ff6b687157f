"""All-reduce on bad wires: ``python -m benchmarks lossy_links --report docs``.

Needs the laboratory (root, or user namespaces: ``lossycoll lab check``). Cells of one network are
measured in one job.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import groupby

from benchmarks.common.runner import Study, batch_by_batch

from .cells import Cell, cells
from .measure import measure


def arguments(parser: argparse.ArgumentParser) -> None:
    help_rounds = "of the lossy variant; the others have fewer in proportion"
    parser.add_argument("--rounds", type=int, help=help_rounds)


def by_network(left: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    for _, group in groupby(left, key=lambda cell: cell.network):
        yield list(group)


STUDY = Study(
    name="lossy_links",
    description=__doc__,
    arguments=arguments,
    plan=lambda options: list(cells()),
    batches=by_network,
    measuring=batch_by_batch(measure),
    report_help="folder of performance.md, for the table, wire.json and wire.png",
)
