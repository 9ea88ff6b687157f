"""Deadlines where paths change: ``python -m benchmarks.studies.deadlines --report docs`` (7
minutes).

Needs the laboratory (root, or user namespaces: ``lossycoll lab check``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import runner
from benchmarks.common.results import Result
from benchmarks.common.runner import Study, one_by_one

from .measure import measure
from .scenarios import SCENARIOS, Trial


def report(results: Sequence[Result], folder: Path) -> str:
    from .report import write

    return write(results, folder)


STUDY = Study(
    name="deadlines",
    description=__doc__,
    plan=lambda options: [Trial(one.name) for one in SCENARIOS],
    measuring=one_by_one(measure),
    report=report,
    report_help="folder of deadlines.md, for the JSON, the table and the picture",
)


def main(arguments: Sequence[str] | None = None) -> int:
    return runner.main(STUDY, arguments)


if __name__ == "__main__":
    sys.exit(main())
