"""Reports as ranks exchange them."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from lossycoll.train.dropcompute.report import (
    COUNTS,
    SECONDS,
    DropReport,
    StepOutcome,
    StepRecord,
    StepSums,
    after_step,
    pack,
    unpack,
)

REPORT = DropReport(
    rank=3, steps=5, completed=17, dropped=2, skipped=1, seconds=12.25, saved=1.5, threshold=2.75,
    choices=1, clock_jumps=4, total_completed=170, total_dropped=30,
)  # fmt: skip


@pytest.mark.parametrize("threshold", [2.75, math.inf])
def test_a_report_that_is_packed_comes_back(threshold: float) -> None:
    report = replace(REPORT, threshold=threshold)
    assert unpack(3, pack(report)) == report
    assert {"rank", "last", *COUNTS, *SECONDS} == {field.name for field in fields(DropReport)}


def test_a_step_is_added() -> None:
    record = StepRecord(laps=(1.0, 2.0), completed=1, returned=0, wanted=4, stopped=True)
    sums = StepSums(11.0, 2.0, 0, 0, 0, 0, 0)
    report = after_step(REPORT, record, StepOutcome(sums, ranks=3, factor=1.25))
    assert (report.steps, report.completed, report.dropped, report.skipped) == (6, 18, 4, 2)
    assert (report.seconds, report.saved) == (15.25, 3.5)
    assert (report.total_completed, report.total_dropped) == (181, 32)
    assert report.last is not None
    assert (report.last.completed, report.last.dropped, report.last.seconds) == (1, 2, 3.0)
    assert (report.last.total_completed, report.last.total_dropped) == (11, 2)
    assert report.last.factor == 1.25
    assert report.drop_rate == 32 / (181 + 32)
