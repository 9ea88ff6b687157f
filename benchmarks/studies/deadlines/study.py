"""Deadlines where paths change: ``python -m benchmarks deadlines --report docs`` (7
minutes).

Needs the laboratory (root, or user namespaces: ``lossycoll lab check``).
"""

from __future__ import annotations

from benchmarks.common.runner import Study, one_by_one

from .measure import measure
from .scenarios import SCENARIOS, Trial

STUDY = Study(
    name="deadlines",
    description=__doc__,
    plan=lambda options: [Trial(one.name) for one in SCENARIOS],
    measuring=one_by_one(measure),
    report_help="folder of deadlines.md, for the JSON, the table and the picture",
)
