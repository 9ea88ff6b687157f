"""Clean wires: ``python -m benchmarks lossless --report docs``.

Loopback needs nothing; veth needs root, or user namespaces, and ip, nft and ethtool (``lossycoll
lab check``); bare sockets need a C compiler.
"""

from __future__ import annotations

import argparse

from benchmarks.common.runner import Study, one_by_one
from lossycoll.cli.argtypes import real, whole

from .cells import FLAT_OPERATIONS, jobs
from .measure import measure


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seconds", type=real(0.05), default=3.0, help="per collective and size (%(default)g)")
    add("--operations", type=whole(1, 10**9), default=FLAT_OPERATIONS, help="of memory")


STUDY = Study(
    name="lossless",
    description=__doc__,
    arguments=arguments,
    plan=lambda options: list(jobs()),
    measuring=one_by_one(measure),
    alike=lambda job: job.part,
    report_help="folder of performance.md, for tables, clean.json and clean.png",
)
