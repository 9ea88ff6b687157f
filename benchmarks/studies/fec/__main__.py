"""Residual loss against overhead, by parity and by resending: ``python -m benchmarks.studies.fec``.

Two ranks all-reduce 4 MiB over loopback in this process, and losses are injected, so the figures
depend on nothing of the machine (but for ``auto`` and ``max_missing``, which hear of the loss from
acknowledgements, and the latter of the round trip too).
The last piece, ``part=lab``, is the time of the same operation between two hosts 80 ms apart, in
the laboratory (``lossycoll lab check``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import runner
from benchmarks.common.results import Result
from benchmarks.common.runner import Study, one_by_one

from .cells import cells
from .measure import measure


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--operations", type=int, default=240, help="at each loss, by each variant (240)")
    add("--rounds", type=int, default=24, help="of the laboratory, by each variant (24)")


def report(results: Sequence[Result], folder: Path) -> None:
    from .report import write

    write(results, folder)


STUDY = Study(
    name="fec",
    description=__doc__,
    arguments=arguments,
    plan=lambda options: list(cells()),
    measuring=one_by_one(measure),
    report=report,
    report_help="folder of performance.md, for tables, fec.json and fec.png",
)


def main(arguments: Sequence[str] | None = None) -> int:
    return runner.main(STUDY, arguments)


if __name__ == "__main__":
    sys.exit(main())
