"""A step's record, and what the ranks add up of it, as data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lossycoll.train.dropcompute.report import FIELDS, StepRecord, StepSums

RECORD = StepRecord(laps=(1.0, 9.0, 2.0), completed=2, returned=0, wanted=5, stopped=True)
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
    left = replace(RECORD, returned=1)
    assert (left.used, left.dropped, left.skipped) == (2, 3, 0)
    whole = replace(RECORD, stopped=False)
    assert (whole.dropped, whole.saved) == (0, 0)
    nothing = StepRecord(laps=(), completed=0, returned=0, wanted=5, stopped=False)
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
    other = replace(ADDENDS, warm_up_left=4, warm_up_left_squared=16).pack(torch.zeros(0))
    assert StepSums.unpack(one + other, 1.0).warm_up_differs(2)
