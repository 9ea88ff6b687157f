"""Which plans are kept, and what they become once ranks are lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lossycoll.options.fields import Options
from lossycoll.plan import (
    default_algorithm,
    draw_order,
    find_algorithm,
    leave_out,
    register,
    rename,
    unregister,
)
from lossycoll.plan.registry import COLLECTIVES
from lossycoll.runtime.collectives import plan_cache
from lossycoll.runtime.collectives.plan_cache import KEPT, PLANS, REPLANNED
from lossycoll.runtime.collectives.sequencer import Members

EVERYONE, FEWER = Members(4, 2, (0, 1, 2, 3)), Members(4, 2, (0, 2, 3))
OPTIONS = {"broadcast": {"root": 3, "fanout": 2}, "gather": {"root": 3}, "scatter": {"root": 3}}


def arguments(collective: str) -> tuple[object, ...]:
    sizes = {"barrier": (), "all_to_all_uneven": ([8] * 4, [8] * 4)}
    return (*sizes.get(collective, (1000,)), 100)


def test_each_collective_has_its_row() -> None:
    assert set(KEPT) == set(COLLECTIVES) - {"point_to_point"}


@pytest.mark.parametrize("collective", KEPT)
def test_plans_are_kept_and_follow_the_members(collective: str) -> None:
    by, sizes = default_algorithm(collective), arguments(collective)
    options = OPTIONS.get(collective, {})
    of_all = PLANS[collective](EVERYONE, by, *sizes, **options)
    assert of_all.plan.signature == by.build(4, 2, *sizes, **options).signature
    again = PLANS[collective](EVERYONE, by, *sizes, **options)
    assert (again is of_all) == bool(KEPT[collective])
    left = PLANS[collective](FEWER, by, *sizes, **options).plan
    if collective in REPLANNED:
        place = {"root": 2} if "root" in options else {}  # rank 3 is the third that is left
        want = rename(by.build(3, 1, *sizes, **{**options, **place}), FEWER.ranks, 4)
    else:
        want = leave_out(by.build(4, 2, *sizes, **options), FEWER.ranks)
    assert left == want
    assert left != of_all.plan


def test_only_direct_plans_are_kept_when_ranks_are_lost() -> None:
    relayed = register(
        replace(find_algorithm("all_gather", "direct"), name="relayed", default=False, direct=False)
    )
    everyone, fewer = Members(4, 0, (0, 1, 2, 3)), Members(4, 0, (0, 2, 3))
    assert plan_cache.algorithm("all_gather", everyone, "relayed") is relayed
    assert plan_cache.algorithm("all_gather", fewer, "relayed") is default_algorithm("all_gather")
    # Collectives without a part for each rank are planned anew, for as many as are left.
    ring = find_algorithm("all_reduce", "ring")
    assert plan_cache.algorithm("all_reduce", fewer, "ring") is ring
    one = Members(4, 0, (0,))
    assert plan_cache.algorithm("all_reduce", one, "ring") is default_algorithm("all_reduce")
    unregister(relayed)


def test_the_order_is_drawn_for_lossy_calls_of_those_that_want_it() -> None:
    other = replace(find_algorithm("all_reduce", "ring"), name="other")
    everyone, fewer = Members(6, 0, tuple(range(6))), Members(6, 0, (0, 2, 3))
    lossy, reliable = Options(seed=3), Options(seed=3, delivery="reliable")
    orders = {plan_cache.order(other, everyone, lossy, 1, op) for op in range(5)}
    assert len(orders) == 5
    assert plan_cache.order(other, fewer, lossy, 1, (1 << 32) + 4) == draw_order(3, 1, 4, 3)
    assert plan_cache.order(other, everyone, reliable, 1, 0) is None
    assert plan_cache.order(replace(other, draws_order=False), everyone, lossy, 1, 0) is None
