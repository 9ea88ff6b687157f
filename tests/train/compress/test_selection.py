"""Which rows a sketch chooses, and how much of a matrix they keep."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lossycoll import ARCTopKState
from lossycoll.train.compress import selection
from lossycoll.train.compress.selection import (
    MatrixShape,
    as_matrix,
    kept_rows,
    pays,
)


def kept(matrix: Tensor, k: int, dim: int, seed: int) -> float:
    """The share of the energy of ``matrix`` that the rows chosen by a sketch have."""
    v = selection.directions(matrix.shape[1], dim, selection.generator(seed), matrix)
    index = selection.best(selection.scores(selection.sketch([(matrix, 1.0)], v)), k)
    assert len(index.unique()) == k
    energy = matrix.double().square().sum(1)
    return float(energy[index].sum() / energy.sum())


ENERGY = {
    0.5: (0.572, 0.397, 0.447, 0.497, 0.550, 0.197),
    1.0: (0.872, 0.722, 0.801, 0.840, 0.865, 0.188),
    1.5: (0.976, 0.910, 0.953, 0.967, 0.974, 0.201),
}
"""By the spread of the rows' sizes: exact top-K, sketches of 1, 2, 4 and 16, rows at random."""
DRAWS = 24


@pytest.mark.parametrize("spread", ENERGY)
def test_the_energy_that_a_sketch_keeps(spread: float) -> None:
    means = torch.zeros(6, dtype=torch.float64)
    for seed in range(DRAWS):
        draw = torch.Generator().manual_seed(seed)
        sizes = torch.exp(spread * torch.randn(1000, 1, generator=draw))
        matrix = sizes * torch.randn(1000, 64, generator=draw)
        energy = matrix.square().sum(1)
        exact = float(energy[selection.best(energy, 200)].sum() / energy.sum())
        drawn = energy[selection.random_rows(1000, 200, selection.generator(seed))]
        found = [kept(matrix, 200, dim, seed) for dim in (1, 2, 4, 16)]
        means += torch.tensor([exact, *found, float(drawn.sum() / energy.sum())]) / DRAWS
    # Of exp(1.5 z) a few rows have most of the energy: one drawn at random, or of the table's
    # single draw, says less than 0.02.
    wide = 0.02 if spread < 1.5 else 0.03
    assert means[:5].tolist() == pytest.approx(ENERGY[spread][:5], abs=wide)
    assert float(means[5]) == pytest.approx(0.2, abs=0.02)


@st.composite
def matrices(draw: Any) -> Tensor:
    """Random ones of any spread, sparse ones, and those that are made to be hard: rows of equal
    norm, rows along one direction, norms in two close levels, one row that has nearly all."""
    rows, columns = draw(st.integers(2, 40)), draw(st.integers(1, 24))
    kind = draw(st.sampled_from(("spread", "sparse", "equal", "aligned", "levels", "one", "tiny")))
    g = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    x = torch.randn(rows, columns, generator=g)
    if kind == "spread":
        x *= torch.exp(draw(st.floats(0, 3)) * torch.randn(rows, 1, generator=g))
    elif kind == "sparse":
        x *= torch.rand(rows, columns, generator=g) < 0.1
    elif kind == "equal":
        x /= x.norm(dim=1, keepdim=True)
    elif kind == "aligned":
        x = torch.randn(rows, 1, generator=g) * x[:1]
    elif kind == "levels":
        x = x / x.norm(dim=1, keepdim=True) * (1 + 0.01 * (torch.arange(rows) % 2)).view(-1, 1)
    elif kind == "one":
        x[rows // 2] *= 1e3
    else:
        x *= 1e-30
    return x


@settings(max_examples=60)
@given(matrices(), st.floats(0.02, 1.0), st.integers(1, 6))
def test_a_sketch_keeps_no_less_than_rows_at_random_would(
    matrix: Tensor, ratio: float, dim: int
) -> None:
    k = kept_rows(len(matrix), ratio)
    if not bool(matrix.any()):
        return
    shares = torch.tensor([kept(matrix, k, dim, seed) for seed in range(48)])
    slack = 3.5 * float(shares.std()) / math.sqrt(len(shares)) + 1e-5
    assert float(shares.mean()) >= k / len(matrix) - slack


def test_equal_scores_are_taken_in_order_and_nan_first() -> None:
    scores = torch.tensor([1.0, 3.0, 1.0, 1.0, 3.0, 0.0])
    assert selection.best(scores, 4).tolist() == [0, 1, 2, 4]
    assert selection.best(torch.zeros(5), 2).tolist() == [0, 1]
    assert selection.best(torch.ones(3), 9).tolist() == [0, 1, 2]
    scores[3] = math.nan
    assert selection.best(scores, 1).tolist() == [3]
    assert selection.best(scores, 3).tolist() == [1, 3, 4]


def test_matrix_forms() -> None:
    by_output = ARCTopKState().matrix_shape
    assert by_output("", torch.empty(64, 16, 3, 3)) == MatrixShape(64, 144)
    assert by_output("", torch.empty(1000, 32)) == MatrixShape(1000, 32)
    by_element = ARCTopKState(method="topk").matrix_shape
    assert by_element("", torch.empty(1000, 32)) == MatrixShape(32000, 1)
    assert [kept_rows(m, 0.1) for m in (1, 10, 30, 31)] == [1, 1, 3, 4]
    assert pays(MatrixShape(1024, 1024), 0.2, 4)
    assert not pays(MatrixShape(1024, 4), 0.2, 4)  # a sketch as wide as the matrix
    assert not pays(MatrixShape(10, 1000), 1.0, 4)
    weight = torch.randn(6, 4, 3, 3)
    assert torch.equal(as_matrix(weight, MatrixShape(6, 36)), weight.view(6, 36))
    last = weight.contiguous(memory_format=torch.channels_last)
    assert torch.equal(
        as_matrix(last, MatrixShape(6, 36)), weight.permute(0, 2, 3, 1).reshape(6, 36)
    )
