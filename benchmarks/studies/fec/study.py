"""Residual loss against overhead, by parity and by resending: ``python -m benchmarks fec``.

Two ranks all-reduce 4 MiB over loopback in this process, and losses are injected, so the figures
depend on nothing of the machine (but for ``auto`` and ``max_missing``, which hear of the loss from
acknowledgements, and the latter of the round trip too).
The last piece, ``part=lab``, is the time of the same operation between two hosts 80 ms apart, in
the laboratory (``lossycoll lab check``).
"""

from __future__ import annotations

import argparse

from benchmarks.common.runner import Study, one_by_one

from .cells import cells
from .measure import measure


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--operations", type=int, default=240, help="at each loss, by each variant (240)")
    add("--rounds", type=int, default=24, help="of the laboratory, by each variant (24)")


STUDY = Study(
    name="fec",
    description=__doc__,
    arguments=arguments,
    plan=lambda options: list(cells()),
    measuring=one_by_one(measure),
    report_help="folder of performance.md, for tables, fec.json and fec.png",
)
