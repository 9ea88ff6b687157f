"""Tensors as matrices whose rows are chosen whole, as data: shapes in, shapes out."""

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
class Form:
    """``rows`` stretches of memory, of ``columns`` elements each."""

    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns


def natural(shape: Sequence[int]) -> Form:
    """The first dimension against all others: an output of a linear layer, a filter of a
    convolution, a token of an embedding."""
    return Form(shape[0], math.prod(shape[1:])) if shape else Form(1, 1)


def entries(shape: Sequence[int]) -> Form:
    """Every element a row of its own."""
    return Form(math.prod(shape), 1)


def kept_rows(rows: int, ratio: float) -> int:
    """K = ceil(ratio * rows), at least 1 (docstring of the paper's code)."""
    return min(rows, max(1, math.ceil(ratio * rows - ROUNDING)))


def pays(form: Form, ratio: float, sketch_dim: int) -> bool:
    """Whether sketch and rows, m r + K n numbers, are fewer than all, m n."""
    sent = form.rows * sketch_dim + kept_rows(form.rows, ratio) * form.columns
    return sent < form.numel


def as_matrix(tensor: Tensor, form: Form) -> Tensor:
    """``tensor`` as (rows, columns) in the order of its memory, which it shares.

    That order is the one of its indices, or another (``channels_last``): the first dimension must
    be the outermost in either. Where it isn't, rows are other stretches of memory, the same on all
    ranks. Raises ValueError for a tensor with gaps.
    """
    if not is_dense(tuple(tensor.shape), tensor.stride()):
        raise ValueError(f"shape {tuple(tensor.shape)} and stride {tensor.stride()} have gaps")
    return tensor.as_strided((form.rows, form.columns), (form.columns, 1))
