"""Clean wires: ``python -m benchmarks.studies.lossless --report docs``.

Loopback needs nothing; veth needs root, or user namespaces, and ip, nft and ethtool (``lossycoll
lab check``); bare sockets need a C compiler.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import runner
from benchmarks.common.results import Result
from benchmarks.common.runner import Study, one_by_one
from lossycoll.cli.argtypes import real, whole

from .cells import FLAT_OPERATIONS, jobs
from .measure import measure


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seconds", type=real(0.05), default=3.0, help="per collective and size (%(default)g)")
    add("--operations", type=whole(1, 10**9), default=FLAT_OPERATIONS, help="of memory")


def report(results: Sequence[Result], folder: Path) -> str:
    from .report import write

    return write(results, folder)


STUDY = Study(
    name="lossless",
    description=__doc__,
    arguments=arguments,
    plan=lambda options: list(jobs()),
    measuring=one_by_one(measure),
    alike=lambda job: job.part,
    report=report,
    report_help="folder of performance.md, for tables, clean.json and clean.png",
)


def main(arguments: Sequence[str] | None = None) -> int:
    return runner.main(STUDY, arguments)


if __name__ == "__main__":
    sys.exit(main())
