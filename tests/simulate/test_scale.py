"""Another number of ranks, from the recorded steps."""

from __future__ import annotations

import numpy as np
import pytest

from lossycoll import OptionError
from lossycoll.simulate import choose
from lossycoll.simulate.theory import empirical, noise_curve
from lossycoll.simulate.threshold import (
    FEWEST_STEPS,
    MOST_TIMES,
    STEPS,
    choose_at,
    profiles,
    resampled,
)
from tests.support import dropcompute_checks as checks
from tests.support.dropcompute_checks import delayed, uneven


def test_ranks_are_put_together_from_whole_recorded_steps() -> None:
    times = uneven(delayed(10, 4, 6))
    times[7] *= 50
    pool = {row.tobytes() for row in profiles(times)}
    assert len(pool) == 9 * 4
    drawn = resampled(times, 100, seed=3)
    assert drawn.shape == (STEPS, 100, 6)
    assert {row.tobytes() for row in drawn.reshape(-1, 6)} == pool
    assert np.array_equal(drawn, resampled(times, 100, seed=3), equal_nan=True)
    assert not np.array_equal(drawn, resampled(times, 100, seed=4), equal_nan=True)
    choice, by = choose_at(times, 0.5, 100, seed=3)
    assert np.array_equal(by, drawn, equal_nan=True)
    assert choice.left_out == (7,)
    assert choice.curve == choose(drawn, 0.5).curve
    with pytest.raises(OptionError, match="0 workers"):
        choose_at(times, 0.5, 0)


def test_thousands_of_ranks_from_many_recorded_steps() -> None:
    times = delayed(400, 16, 12)
    found, drawn = choose_at(times, 0.0, 4096)
    assert drawn.shape == (STEPS, 4096, 12)
    # 6,400 recorded steps of a rank hardly have the slowest of 4,096: a little less than exact.
    wanted = checks.best(checks.exact(4096))
    assert wanted.speedup - 0.15 < found.speedup < wanted.speedup + 0.02
    assert found.drop_rate == pytest.approx(wanted.drop_rate, abs=0.04)
    independent = noise_curve(checks.THRESHOLDS, 4096, 12, empirical(times), 0.0)
    assert checks.best(independent).speedup == pytest.approx(wanted.speedup, abs=0.03)
    wide = resampled(delayed(2, 2, 100), 20_000, 0)
    assert len(wide) == FEWEST_STEPS
    assert len(resampled(delayed(2, 2, 100), 4000, 0)) == MOST_TIMES // (4000 * 100)


def test_a_small_recording_finds_the_threshold_of_a_thousand_ranks() -> None:
    """96 recorded steps of a rank promise too little, but their threshold is a good one."""
    row = checks.extrapolated(1024, recordings=4)
    assert row["resampled"] < row["true"] - 0.1
    assert row["fitted"] > row["true"]
    assert abs(row["independent"] - row["true"]) < 0.1
    assert 0.97 * row["true"] < row["kept"] <= row["true"] + 1e-3
