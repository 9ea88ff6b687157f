"""Who gets how much of a link: ``python -m benchmarks fairness --report docs``.

Two hosts of the laboratory (``lossycoll lab check``), one link, full in both directions: two jobs
of which the second begins later, and a job beside one TCP flow, with cubic and with bbr.
"""

from __future__ import annotations

import argparse

from benchmarks.common.runner import Study, one_by_one

from .contests import CONTESTS
from .measure import measure


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=25.0, help="of sharing, per contest")


STUDY = Study(
    name="fairness",
    description=__doc__,
    arguments=arguments,
    plan=lambda options: CONTESTS,
    measuring=one_by_one(measure),
    report_help="folder of congestion-results.md, for the table, sharing.json and sharing.png",
)
