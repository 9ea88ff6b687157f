"""Reports as ranks exchange them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lossycoll.train.dropcompute.report import (
    FIELDS,
    DropReport,
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


def test_a_step_is_added() -> None:
    record = StepRecord(wanted=4, laps=[1.0, 2.0], completed=1, stopped=True)
    sums = StepSums(11.0, 2.0, 0, 0, 0, 0, 0)
    report = after_step(REPORT, record, sums, 1.25)
    assert (report.steps, report.completed, report.dropped, report.skipped) == (6, 18, 4, 2)
    assert (report.seconds, report.saved) == (15.25, 3.5)
    assert (report.total_completed, report.total_dropped) == (181, 32)
    assert report.last is not None
    assert (report.last.completed, report.last.dropped, report.last.seconds) == (1, 2, 3.0)
    assert (report.last.total_completed, report.last.total_dropped) == (11, 2)
    assert report.last.factor == 1.25
    assert report.drop_rate == 32 / (181 + 32)


RECORD = StepRecord(wanted=5, laps=[1.0, 9.0, 2.0], completed=2, stopped=True)
ADDENDS = StepSums(
    completed=2,
    dropped=2,
    outdated=False,
    warm_up_left=3,
    warm_up_left_squared=9,
    threshold=0.1,
    unfinished=True,
)


def test_a_record_tells_dropped_from_skipped() -> None:
    assert (RECORD.used, RECORD.dropped, RECORD.skipped) == (3, 2, 1)
    assert (RECORD.seconds, RECORD.saved) == (12.0, 2 * 2.0)
    left = replace(RECORD, returned=["late"])
    assert (left.used, left.dropped, left.skipped) == (2, 3, 0)
    whole = replace(RECORD, stopped=False)
    assert (whole.dropped, whole.saved) == (0, 0)
    nothing = StepRecord(wanted=5)
    assert (nothing.used, nothing.dropped, nothing.seconds, nothing.saved) == (0, 0, 0, 0)


def test_what_is_packed_adds_up() -> None:
    packed = ADDENDS.pack(torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert packed.dtype == torch.float64
    assert packed.tolist() == [2, 2, 0, 3, 9, 0.1, 1, 1, 0]
    assert StepSums.unpack(packed, 1.0) == ADDENDS
    three = StepSums.unpack(3 * packed, 1.0)
    assert (three.completed, three.warm_up_left, three.unfinished) == (6, 9, 3)
    assert not three.warm_up_differs(3)
    assert packed[FIELDS:].tolist() == [1, 0]
    # After the loss of one of three ranks a sum is the mean over two, times three.
    two = StepSums.unpack(3 * packed, 2 / 3)
    assert two.completed == pytest.approx(4)
    assert not two.warm_up_differs(2)


def test_ranks_whose_warm_ups_differ_are_seen() -> None:
    one = ADDENDS.pack(torch.zeros(0, dtype=torch.float64))
    other = ADDENDS._replace(warm_up_left=4, warm_up_left_squared=16).pack(torch.zeros(0))
    assert StepSums.unpack(one + other, 1.0).warm_up_differs(2)
