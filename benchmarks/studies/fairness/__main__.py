"""Who gets how much of a link: ``python -m benchmarks.studies.fairness --report docs``.

Two hosts of the laboratory (``lossycoll lab check``), one link, full in both directions: two jobs
of which the second begins later, and a job beside one TCP flow, with cubic and with bbr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import runner
from benchmarks.common.results import Result
from benchmarks.common.runner import Study, one_by_one

from .contests import CONTESTS
from .measure import measure


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=25.0, help="of sharing, per contest")


def report(results: Sequence[Result], folder: Path) -> None:
    from .report import write

    write(results, folder)


STUDY = Study(
    name="fairness",
    description=__doc__,
    arguments=arguments,
    plan=lambda options: CONTESTS,
    measuring=one_by_one(measure),
    report=report,
    report_help="folder of congestion.md, for the table, sharing.json and sharing.png",
)


def main(arguments: Sequence[str] | None = None) -> int:
    return runner.main(STUDY, arguments)


if __name__ == "__main__":
    sys.exit(main())
