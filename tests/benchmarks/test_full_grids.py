"""Full grids have the exact mean whenever peers start, and in whatever order they call."""

from __future__ import annotations

import random

import pytest

from benchmarks.micro.full_grids import ORDERS, busy, context_of, start
from lossycoll.plan.grid import parse


@pytest.mark.parametrize(
    ("grid", "starts"),
    [
        ("2x2x2", 1),
        pytest.param("2x2x2", 5, marks=pytest.mark.long),
        pytest.param("4x4", 3, marks=pytest.mark.long),
    ],
)
def test_peers_that_start_beside_load_have_the_exact_mean(grid: str, starts: int) -> None:
    """``starts``: of each order of the calls."""
    context, draw = context_of(), random.Random(starts)
    with busy(2, context):
        for _ in range(starts):
            for order in ORDERS:
                is_exact, _, wrong = start(parse(grid), order, draw, context)
                assert is_exact, f"{order}: {wrong}"
