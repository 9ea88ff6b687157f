"""Which plans are kept, and what they become once ranks are lost."""

from __future__ import annotations

import pytest

from lossycoll.plan import default_algorithm, leave_out, rename
from lossycoll.plan.registry import COLLECTIVES
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
