"""Distributions of a micro-batch's time, and which one fits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.common.delays import Delayed
from lossycoll import OptionError
from lossycoll.simulate.theory import exponential, fit, log_normal, normal
from tests.support import dropcompute_checks as checks


def test_the_delay_has_the_moments_of_the_authors_code() -> None:
    delay = Delayed()
    assert delay.mean == pytest.approx(1.5, rel=1e-12)
    assert delay.std / 0.5 == pytest.approx(1.1619, abs=1e-4)
    assert delay.cdf(np.array([1 + 0.5 * 11.41]))[0] == pytest.approx(1, abs=1e-12)
    assert delay.cdf(np.array([1 + 0.5 * 11.395]))[0] < 1
    drawn = (delay.draw(np.random.default_rng(1), (1_000_000,)) - 1) / 0.5
    assert drawn.mean() == pytest.approx(1, abs=4 * 1.162 / 1000)
    assert drawn.std() == pytest.approx(1.162, abs=0.01)
    assert drawn.max() <= 11.40
    assert Delayed(2.0, 0.0).draw(np.random.default_rng(1), (3,)).tolist() == [2.0] * 3


@pytest.mark.parametrize(
    "noise", [normal(1.0, 0.1), log_normal(0.0, -1.0, 0.7), exponential(0.8, 0.2)], ids=str
)
def test_a_fit_finds_what_was_drawn(noise: Any) -> None:
    drawn = checks.drawn(noise, 2, (20, 10, 30))
    drawn[0, 0, -3:] = np.nan
    found = fit(drawn)
    assert str(found).split()[0] == str(noise).split()[0]
    assert found.mean == pytest.approx(noise.mean, rel=0.02)
    assert found.std == pytest.approx(noise.std, rel=0.05)


def test_a_fit_of_little() -> None:
    assert str(fit([2.0, 2.0])) == "normal, 2 s +- 0 s"
    assert fit([2.0, 0.0]).mean == pytest.approx(1.0)
    with pytest.raises(OptionError, match="no times"):
        fit([math.nan])
