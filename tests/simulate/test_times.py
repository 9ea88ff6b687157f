"""Recorded times that can't be are refused; of files, tests/cli/test_plan_threshold.py has more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lossycoll import OptionError
from lossycoll.simulate import choose
from lossycoll.simulate.times import Times, parse
from tests.support.dropcompute_checks import delayed


def nan_within(times: Times) -> None:
    times[1, 2, 3] = np.nan


def gone(times: Times) -> None:
    times[2] = np.nan


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda t: t.__setitem__((1, 2, 3), -1e-9), "step 1, rank 2, micro-batch 3: .* -1e-09 s"),
        (lambda t: t.__setitem__((0, 0, 5), np.inf), "step 0, rank 0, micro-batch 5: .* inf s"),
        (nan_within, "step 1, rank 2, micro-batch 3: the time is nan s"),
        (gone, "step 2: no rank has a micro-batch"),
        (lambda t: t.fill(0), "all times are 0 s"),
    ],
)
def test_times_that_cannot_be_are_refused(spoil: Any, complaint: str) -> None:
    times = delayed(3, 4, 6)
    spoil(times)
    with pytest.raises(OptionError, match=complaint):
        choose(times, 0.0)


@pytest.mark.parametrize("times", [np.zeros((0, 2, 3)), np.ones((2, 3)), [[[1.0], [1, 2]]], "no"])
def test_other_shapes_are_refused(times: Any) -> None:
    with pytest.raises(ValueError, match=r"wanted: .*\[steps, ranks, micro-batches\]"):
        choose(times, 0.0)


def test_other_keys_of_a_file_are_the_users_own() -> None:
    steps = [[[0.1, 0.2], [0.1]]]
    found = parse({"micro_batch_seconds": steps, "communication_seconds": 0, "machine": "ours"})
    assert found.times.shape == (1, 2, 2)
    assert np.isnan(found.times[0, 1, 1])
