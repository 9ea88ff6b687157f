"""Tensors as matrices whose rows are sent whole or not at all, as data: shapes in, shapes out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from lossycoll.train.common.layout import is_dense

ROUNDING: Final = 1e-9
"""Of a ratio times a number of rows: 0.1 * 30 rows are 3, not the 3.0000000000000004 of floats."""


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """Stretches of memory of equal length."""

    rows: int  # how many there are
    columns: int  # elements of each

    @property
    def numel(self) -> int:
        """All elements."""
        return self.rows * self.columns


def by_first_dimension(shape: Sequence[int]) -> MatrixShape:
    """The first dimension against all others.

    A row is then an output of a linear layer, a filter of a convolution, a token of an embedding. A
    scalar is (1, 1).
    """
    return MatrixShape(shape[0], math.prod(shape[1:])) if shape else MatrixShape(1, 1)


def by_element(shape: Sequence[int]) -> MatrixShape:
    """Makes every element a row of its own."""
    return MatrixShape(math.prod(shape), 1)


def kept_rows(rows: int, ratio: float) -> int:
    """K = ceil(ratio * rows), at least 1 (arXiv 2510.26709, docstring of the paper's code)."""
    return min(rows, max(1, math.ceil(ratio * rows - ROUNDING)))


def pays(matrix: MatrixShape, ratio: float, sketch_dim: int) -> bool:
    """Whether sketch and rows, m r + K n numbers, are fewer than all, m n."""
    sent = matrix.rows * sketch_dim + kept_rows(matrix.rows, ratio) * matrix.columns
    return sent < matrix.numel


def as_matrix(tensor: Tensor, matrix: MatrixShape) -> Tensor:
    """A view (rows, columns) of a tensor in the order of its memory; ValueError if it has gaps.

    That order is the one of its indices, or another (``channels_last``): the first dimension must
    be the outermost in either. Where it isn't, rows are other stretches of memory, the same on all
    ranks.
    """
    if not is_dense(tuple(tensor.shape), tensor.stride()):
        raise ValueError(f"shape {tuple(tensor.shape)} and stride {tensor.stride()} have gaps")
    return tensor.as_strided((matrix.rows, matrix.columns), (matrix.columns, 1))
