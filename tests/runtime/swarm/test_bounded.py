"""Rounds that believe no contribution and no mean that has gone too far: over loopback."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from lossycoll.errors import OptionError
from lossycoll.plan.codec import Floats
from lossycoll.runtime.swarm.means import BoundedRound
from lossycoll.runtime.swarm.member import RoundReport, SwarmMember
from tests.runtime.swarm.test_member import SCHEMA, directory, peers, together

COUNT = 5000
MOST = 3.0


def bounded(stack: ExitStack, count: int, **options: Any) -> list[SwarmMember]:
    made = peers(stack, directory(stack, None), [str(n) for n in range(count)], None, **options)
    for one in made:
        one.averages(SCHEMA, max_norm=MOST)
    return made


def trained(count: int, seed: int = 3) -> tuple[Floats, list[Floats]]:
    """Where a round ended, and what peers have come to from there, each as far as the others."""
    draw = np.random.default_rng(seed)
    reference = draw.normal(size=COUNT).astype(np.float32)
    way = draw.normal(size=COUNT)
    return reference, [
        (reference + 0.02 * (way + draw.normal(size=COUNT))).astype(np.float32)
        for _ in range(count)
    ]


def has(
    members: list[SwarmMember], values: list[Floats], reference: Floats, weights: Any = ()
) -> list[RoundReport]:
    for one in members:
        plain = one.average
        one.average = lambda *a, plain=plain: plain(*a, reference=reference.copy())  # type: ignore
    return together(members, values, weights)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_without_liars_it_is_the_mean(count: int, stack: ExitStack) -> None:
    """By weights, which need not be equal, and a newcomer brings nothing."""
    reference, values = trained(count + 1)
    weights = [*(1.0 + number % 4 for number in range(count)), 0.0]
    wanted = np.average(values[:count], axis=0, weights=weights[:count])
    reports = has(bounded(stack, count + 1), values, reference, weights)
    for one, report in zip(values, reports, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=0, atol=1e-5)
        assert (report.failure, report.refused, report.kept) == ("", (), 0.0)
    assert all(one.contributions == pytest.approx(count) for one in reports[:count])


@pytest.mark.parametrize("lie", ["x1000", "negative", "huge"])
@pytest.mark.parametrize("count", [3, 8])
def test_a_liar_is_left_out(count: int, lie: str, stack: ExitStack) -> None:
    reference, values = trained(count)
    wanted = np.mean(values[1:], axis=0)
    values[0][:] = {"x1000": 1000, "negative": -1, "huge": 1e37}[lie] * values[0]
    members = bounded(stack, count)
    reports = has(members, values, reference)
    owned = [one for one in reports if one.refused]
    assert len(owned) >= count - 1
    assert {one.refused for one in reports[1:]} == {(members[0].number,)}
    for one, report in zip(values[1:], reports[1:], strict=True):
        share = np.abs(one - wanted) > 1e-5
        # Of the part that the liar owns the mean is its own: it isn't believed, either.
        assert share.mean() <= 1 / count + 0.05
        assert report.kept <= 1 / count + 0.05
        assert np.abs(one - wanted).max() < 0.2


@pytest.mark.parametrize("lie", [1.0, 1000.0])
@pytest.mark.parametrize("where", ["first half", "second half", "all"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_what_nobody_trains_stays_whatever_one_says(
    count: int, where: str, lie: float, stack: ExitStack
) -> None:
    """Frozen values, which may be all of what a peer owns. A liar is refused there, and an honest
    peer isn't for what rounding does."""
    reference, values = trained(count)
    half = COUNT // 2
    frozen = {"first half": slice(half), "second half": slice(half, None), "all": slice(None)}
    for one in values:
        one[frozen[where]] = reference[frozen[where]]
    values[0] *= np.float32(lie)
    members = bounded(stack, count)
    reports = has(members, values, reference)
    for _ in range(2):
        for one, report in zip(values[1:], reports[1:], strict=True):
            ends = one[frozen[where]], reference[frozen[where]]
            np.testing.assert_allclose(*ends, rtol=1e-5, atol=1e-6)
            assert report.refused == (() if lie == 1 else (members[0].number,))
        values[0] *= np.float32(lie)
        reports = together(members, values)


def test_an_owner_that_spreads_lies_is_not_believed(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, values = trained(4)
    own, wanted = [one.copy() for one in values], np.mean(values, axis=0)
    values[2][-1] = mark = np.float32(0.0625)
    plain, lied = BoundedRound.combine, []

    def combine(self: BoundedRound, *given: Any) -> float:
        found = plain(self, *given)
        if self.values[-1] == mark:
            self.means[self._mine] *= -1000
            lied.append(self._mine)
        return found

    monkeypatch.setattr(BoundedRound, "combine", combine)
    members = bounded(stack, 4)
    reports = has(members, values, reference)
    (part,) = lied
    for number in (0, 1, 3):
        assert reports[number].refused == (members[2].number,)
        np.testing.assert_array_equal(values[number][part], own[number][part])
        rest = np.ones(COUNT - 1, np.bool_)
        rest[part] = False
        np.testing.assert_allclose(values[number][:-1][rest], wanted[:-1][rest], rtol=0, atol=1e-5)


def test_lost_packets_cost_contributions_and_nothing_else(stack: ExitStack) -> None:
    reference, values = trained(4)
    least, greatest = np.min(values, axis=0), np.max(values, axis=0)
    members = bounded(stack, 4, inject="loss=0.2,seed=5")
    reports = has(members, values, reference)
    assert all(one.failure == "" and one.refused == () for one in reports)
    assert any(one.contributions < 3.9 for one in reports), "nothing was lost"
    for one in values:
        assert (one >= least - 1e-5).all()
        assert (one <= greatest + 1e-5).all()


def test_few_bits_are_refused_with_it(stack: ExitStack) -> None:
    (one,) = peers(stack, directory(stack, None), ["a"], None)
    with pytest.raises(OptionError, match="max_norm is 3 and the wire int8, wanted no wire"):
        one.averages(SCHEMA, wire="int8", max_norm=3.0)
