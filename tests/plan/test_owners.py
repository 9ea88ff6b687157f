"""Parts of a buffer by the rates of links, and the all-reduce of owners with such parts."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from lossycoll.plan import owners, segments
from tests.oracle.reference_executor import execute
from tests.support.plan_checks import nothing


def ends(parts: tuple[Fraction, ...], rates: tuple[int, ...]) -> Fraction:
    """When the last rank has sent all that it has to, and got all."""
    n = len(parts)
    return max(
        (1 - part + (n - 1) * part) / Fraction(rate)
        for part, rate in zip(parts, rates, strict=True)
    )


@pytest.mark.parametrize("steps", [24])
def test_no_other_parts_end_sooner(steps: int) -> None:
    """All parts in steps of a 24th, of three and four ranks."""
    rng = np.random.default_rng(3)
    zeros = 0
    for world in (3, 4):
        for _ in range(25):
            rates = tuple(int(rate) for rate in rng.integers(1, 40, world))
            parts = owners.fractions(rates)
            assert sum(parts) == 1
            assert min(parts) >= 0
            zeros += parts.count(Fraction(0))
            best = min(
                ends((*(Fraction(x, steps) for x in some), 1 - Fraction(sum(some), steps)), rates)
                for some in product(range(steps + 1), repeat=world - 1)
                if sum(some) <= steps
            )
            assert ends(parts, rates) <= best
            # Those that own something end at once.
            times = {
                (1 + (world - 2) * part) / rate
                for part, rate in zip(parts, rates, strict=True)
                if part
            }
            assert len(times) == 1
    assert zeros > 5, "no link was too slow to own anything"


def test_parts_of_equal_links_and_of_few_ranks() -> None:
    for world in (1, 2, 3, 7, 32):
        assert owners.fractions((7,) * world) == (Fraction(1, world),) * world
    assert owners.fractions((5, 1)) == (Fraction(1, 2),) * 2, "any parts cost the same"
    assert owners.fractions((0, 1)) == (0, 1)
    assert owners.fractions((0, 1, 1)) == (0, Fraction(1, 2), Fraction(1, 2))
    assert owners.fractions((10**12, 1, 1, 1)) == (1, 0, 0, 0)
    assert owners.fractions((5, 5, 5, 1)) == (Fraction(1, 3),) * 3 + (0,)
    assert owners.fractions((5, 5, 5, 4))[3] == Fraction(5, 38)
    for rates in ((), (0, 0), (1, -1)):
        with pytest.raises(ValueError, match="wanted 0 or more, and one above 0"):
            owners.fractions(rates)


def test_equal_parts_are_those_of_other_plans() -> None:
    for elements, world in product((0, 1, 9, 10, 11, 95, 1000), (1, 2, 3, 5)):
        lengths = owners.owned(elements, 10, (3,) * world)
        assert lengths == tuple(length for _, length in segments(elements, world, 10))
    assert sum(owners.owned(12345, 10, (1, 2, 3, 40, 5))) == 12345


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_mean_of_those_that_give(world: int) -> None:
    rng = np.random.default_rng(world)
    for _ in range(30):
        elements = int(rng.integers(0, 200))
        gives = rng.random(world) < 0.7
        gives[rng.integers(world)] = True
        rates = [
            int(rate) if give else 0
            for rate, give in zip(rng.integers(1, 9, world), gives, strict=True)
        ]
        lengths = owners.owned(elements, 8, rates)
        plans = [owners.all_reduce(world, r, lengths, gives.tolist(), 8) for r in range(world)]
        weights = np.where(gives, rng.random(world) + 0.1, 0.0)
        values = [rng.standard_normal(elements).astype(np.float32) for _ in range(world)]
        wanted = np.average(values, axis=0, weights=weights)
        execute(
            plans,
            values,
            values,
            "f32",
            1.0,
            nothing,
            0,
            weights=np.tile(weights, (world, 1)),
            divisor=0.0,
        )
        for one in values:
            np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_an_owner_gets_each_contribution_and_all_get_what_it_owns(world: int) -> None:
    """A round whose contributions are bounded: collected, combined by the owner, spread."""
    rng = np.random.default_rng(10 + world)
    for _ in range(30):
        gives = rng.random(world) < 0.7
        gives[rng.integers(world)] = True
        rates = (rng.integers(1, 9, world) * gives).tolist()
        lengths = owners.owned(int(rng.integers(1, 200)), 8, rates)
        begin = np.cumsum([0, *lengths])
        plans = [owners.collect(world, r, lengths, gives.tolist(), 8) for r in range(world)]
        assert len({plan.signature for plan in plans}) == 1
        values = [rng.standard_normal(sum(lengths)).astype(np.float32) for _ in range(world)]
        rows = [np.full(plan.out_elements, np.nan, np.float32) for plan in plans]
        execute(plans, values, rows, "f32", 1.0, nothing, 0)
        for rank, own in enumerate(lengths):
            for sender in np.flatnonzero(gives) if own else ():
                got = rows[rank][sender * own : (sender + 1) * own]
                np.testing.assert_array_equal(got, values[sender][begin[rank] : begin[rank + 1]])
            assert own == 0 or np.isnan(rows[rank]).sum() == own * (world - gives.sum())
        plans = [owners.spread(world, r, lengths, 8) for r in range(world)]
        execute(plans, values, values, "f32", 1.0, nothing, 0)
        for one in values[1:]:
            np.testing.assert_array_equal(one, values[0])


def test_plans_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="lengths"):
        owners.all_reduce(2, 0, (8,), (True, True), 8)
    with pytest.raises(ValueError, match="rank"):
        owners.all_reduce(2, 2, (8, 8), (True, True), 8)
