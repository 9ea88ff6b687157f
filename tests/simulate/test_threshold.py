"""The threshold that is chosen: beside the authors' log, plain loops and properties."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lossycoll import OptionError
from lossycoll.simulate import Choice, choose
from lossycoll.simulate.threshold import LEAST_GAIN, curve, floor, threshold_of
from lossycoll.simulate.times import Times, checked, compute_seconds, usual
from tests.support import dropcompute_checks as checks
from tests.support.dropcompute_checks import delayed, uneven

CUTS = ("finished", "threshold", "started")


def test_the_authors_log() -> None:
    found = checks.authors_log(8, runs=60)
    for name, wanted in (("threshold", 5.985), ("drop_rate", 0.076), ("saved", 0.142)):
        mean, deviation = found[name]
        assert mean == pytest.approx(wanted, abs=deviation / 2), name
    assert found["gain"][0] == pytest.approx(0.080, abs=0.005)
    for name, value in checks.LOG.items():
        mean, deviation = found[name]
        assert abs(value - mean) < deviation, name
    # Had their 16 ranks been independent, it would have been another log.
    mean, deviation = checks.authors_log(16, runs=20)["gain"]
    assert mean - checks.LOG["gain"] > 2 * deviation


def by_loops(times: Times, tau: float, communication: float, cut: str) -> tuple[float, ...]:
    """One threshold, step by step and micro-batch by micro-batch."""
    found = []
    for step in times:
        full = last = 0.0
        count = done = 0
        for rank in step:
            clock = 0.0
            for seconds in rank[~np.isnan(rank)]:
                began, clock = clock, clock + seconds
                full = max(full, clock)
                count += 1
                if (began if cut == "started" else clock) < tau:
                    done += 1
                    last = max(last, clock)
        spent = min(tau, full) if cut == "threshold" else last
        gain = done / count * (full + communication) / (spent + communication)
        found.append((1 - done / count, spent + communication, gain))
    return tuple(np.mean(found, axis=0))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("communication", [0.0, 2.0])
def test_the_curve_is_that_of_plain_loops(cut: Any, communication: float) -> None:
    times = uneven(delayed(6, 5, 8))
    taus = np.linspace(2.5, 25, 40)
    for point in curve(times, taus, communication, cut=cut):
        wanted = by_loops(times, point.threshold, communication, cut)
        assert (point.drop_rate, point.step_seconds, point.speedup) == pytest.approx(wanted)


@pytest.mark.parametrize("cut", CUTS)
def test_the_choice_is_the_best_of_the_curve(cut: Any) -> None:
    times = uneven(delayed(30, 16, 8))
    choice = choose(times, 0.5, cut=cut)
    thresholds = [point.threshold for point in choice.curve]
    assert thresholds == sorted(thresholds)
    assert len(thresholds) == 200
    assert choice.threshold in thresholds
    assert choice.speedup == max(point.speedup for point in choice.curve) > 1 + LEAST_GAIN
    assert 0 < choice.drop_rate < 0.5
    assert (choice.curve[-1].drop_rate, choice.curve[-1].speedup) == pytest.approx((0, 1))
    full = compute_seconds(times).mean() + 0.5
    assert choice.curve[-1].step_seconds == pytest.approx(full)
    # Ranks that have the same times must find the same.
    assert choose(times.copy(), 0.5, cut=cut) == choice


def test_what_is_begun_and_finished_gains_less() -> None:
    """A micro-batch of the paper's delay may take five times the mean: to see it through costs."""
    row = checks.cuts(64, 200)
    assert row["finished"] == pytest.approx(1.285, abs=0.02)
    assert row["threshold"] == pytest.approx(1.285, abs=0.02)
    assert 1.1 < row["started"] < 1.2


def test_more_communication_is_less_to_gain() -> None:
    times = delayed(20, 8, 8)
    gains = [choose(times, communication).speedup for communication in (0.0, 2.0, 10.0, 100.0)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > gains[-1] == 1.0


def test_dropping_never_pays_without_noise() -> None:
    choice = choose(np.full((5, 4, 6), 0.25), 0.0)
    assert (choice.threshold, choice.drop_rate, choice.speedup) == (math.inf, 0.0, 1.0)
    jitter = 1 + 0.001 * np.random.default_rng(0).standard_normal((50, 8, 6))
    assert choose(jitter, 0.0).threshold == math.inf
    # A single micro-batch can't be dropped.
    assert choose(delayed(20, 8, 1), 0.0).threshold == math.inf


seconds = st.floats(0.01, 100, allow_nan=False)


@st.composite
def recordings(draw: st.DrawFn) -> Times:
    steps, ranks, batches = (draw(st.integers(1, 4)) for _ in range(3))
    out = np.full((steps, ranks, batches), np.nan)
    for step, rank in itertools.product(range(steps), range(ranks)):
        count = draw(st.integers(1 if rank == 0 else 0, batches))
        out[step, rank, :count] = draw(st.lists(seconds, min_size=count, max_size=count))
    return out


@settings(max_examples=120)
@given(recordings(), st.floats(0, 10), st.sampled_from(CUTS), st.floats(0, 0.99))
def test_drop_grows_with_a_falling_threshold(
    times: Times, communication: float, cut: Any, wanted: float
) -> None:
    choice = choose(times, communication, cut=cut)
    kept = times[usual(times)]
    for lower, higher in itertools.pairwise(choice.curve):
        assert lower.threshold < higher.threshold
        assert lower.drop_rate >= higher.drop_rate - 1e-12
        assert lower.step_seconds <= higher.step_seconds + 1e-9
    assert choice.curve[0].threshold > np.nanmax(kept[:, :, 0])
    assert choice.curve[-1].drop_rate == pytest.approx(0, abs=1e-12)
    assert choice.speedup >= 1
    assert all(np.isfinite([p.drop_rate, p.step_seconds, p.speedup]).all() for p in choice.curve)

    asked = choose(times, communication, cut=cut, drop_rate=wanted)
    assert asked.threshold >= floor(kept)
    assert asked.drop_rate <= wanted + 1e-9
    if asked.threshold > floor(kept):
        # None that is smaller drops as little.
        below = np.array([np.nextafter(asked.threshold, 0)])
        assert curve(kept, below, communication, cut=cut)[0].drop_rate > wanted - 1e-9


@pytest.mark.parametrize("wanted", [0.0, 0.02, 0.1, 0.3])
def test_a_wanted_drop_rate(wanted: float) -> None:
    times = delayed(40, 8, 12)
    choice = choose(times, 1.0, drop_rate=wanted)
    assert wanted - 1 / (8 * 12) < choice.drop_rate <= wanted
    # The drop rate of the simulated run, not only the predicted one.
    dropped = (times.cumsum(axis=2) >= choice.threshold).mean()
    assert dropped == pytest.approx(choice.drop_rate)
    assert choice.speedup == 1 if wanted == 0 else choice.speedup > 1


def test_a_wanted_drop_rate_keeps_the_first_micro_batch() -> None:
    times = delayed(10, 4, 6)
    choice = choose(times, 0.0, drop_rate=0.99)
    assert choice.threshold == np.nextafter(times[:, :, 0].max(), math.inf)
    assert threshold_of(times, 0.99) < choice.threshold
    assert choice.drop_rate < 0.99


@pytest.mark.parametrize("place", ["everywhere", "one rank", "first micro-batch"])
def test_one_slow_outlier_has_no_say(place: str) -> None:
    clean = delayed(44, 8, 12, clean=0.34)
    wanted = choose(np.delete(clean, 17, axis=0), 2.0)
    slow = clean.copy()
    slow[17, {"everywhere": slice(None)}.get(place, 3), 0 if "first" in place else slice(None)] *= (
        100
    )
    assert slow[17].sum(axis=1).max() > 4 * clean[17].sum(axis=1).max()
    choice = choose(slow, 2.0)
    assert choice.left_out == (17,)
    assert choice == Choice(wanted.threshold, wanted.drop_rate, wanted.speedup, wanted.curve, (17,))
    # With it, the mean over steps would promise what no other step keeps.
    (fooled,) = curve(slow, np.array([choice.threshold]), 2.0, cut="threshold")
    assert fooled.speedup > wanted.speedup + 0.05 or place == "everywhere"


def test_what_is_often_slow_is_no_outlier() -> None:
    times = delayed(44, 8, 12)
    times[::10, 2] *= 8
    choice = choose(times, 0.0)
    assert choice.left_out == ()
    assert choice.speedup > choose(delayed(44, 8, 12), 0.0).speedup + 0.3
    assert usual(delayed(1, 2, 3)).tolist() == [True]
    assert usual(np.array([[[1.0]], [[1000.0]]])).tolist() == [True, True]
    assert usual(np.array([[[1.0]], [[1000.0]], [[1.1]]])).tolist() == [True, False, True]


def test_a_rank_that_stalls_in_one_step_of_few() -> None:
    """A warm-up of three steps, of which the first compiles."""
    times = delayed(3, 4, 6)
    times[0] += 60
    assert choose(times, 0.0).left_out == (0,)
    assert choose(times, 0.0, drop_rate=0.1).threshold < 20


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"communication": -1.0}, "communication is -1.0 s"),
        ({"communication": math.nan}, "communication is nan s"),
        ({"communication": math.inf}, "communication is inf s"),
        ({"drop_rate": 1.0}, "drop rate is 1.0"),
        ({"drop_rate": -0.1}, "drop rate is -0.1"),
        ({"drop_rate": math.nan}, "drop rate is nan"),
        ({"cut": "last"}, "cut is 'last'; wanted: one of finished, threshold, started"),
    ],
)
def test_other_arguments_are_refused(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        choose(delayed(3, 4, 6), **{"communication": 0.0, **arguments})


def test_a_rank_without_micro_batches_counts_for_nothing() -> None:
    times = delayed(6, 4, 6)
    times[3, 1] = np.nan
    assert checked(times) is not None
    with_it, wanted = choose(times, 0.0), by_loops(times, 9.0, 0.0, "finished")
    assert with_it.speedup > 1
    assert curve(times, np.array([9.0]), 0.0)[0].speedup == pytest.approx(wanted[2])
