"""Chooses the rows of a matrix that are sent: sketch, scores, the K best (arXiv 2510.26709).

All ranks must choose the same rows. So they compute from what they all have, bit for bit, in
operations for which IEEE 754 defines every bit: products, sums in a stated order, comparisons.
Ranks on different processors, whose libraries may round long sums differently, still agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

ROUNDING: Final = 1e-9
"""Rounding error of a ratio of rows: 0.1 * 30 is 3, not the 3.0000000000000004 of floats."""


class MatrixShape(NamedTuple):
    """Stretches of memory of equal length."""

    rows: int  # how many there are
    columns: int  # elements of each


def kept_rows(rows: int, ratio: float) -> int:
    """K = ceil(ratio * rows), at least 1 (arXiv 2510.26709, docstring of the paper's code)."""
    return min(rows, max(1, math.ceil(ratio * rows - ROUNDING)))


def pays(matrix: MatrixShape, ratio: float, sketch_dim: int) -> bool:
    """True if sketch and rows, m r + K n numbers, are fewer than all, m n."""
    sent = matrix.rows * sketch_dim + kept_rows(matrix.rows, ratio) * matrix.columns
    return sent < matrix.rows * matrix.columns


def as_matrix(tensor: Tensor, matrix: MatrixShape) -> Tensor:
    """A view (rows, columns) of a tensor without gaps, in the order of its memory.

    Where the first dimension isn't the outermost in it, rows are other stretches of memory, the
    same on all ranks.
    """
    return tensor.as_strided((matrix.rows, matrix.columns), (matrix.columns, 1))


Parts = Sequence[tuple[Tensor, float]]
"""A matrix as a sum: tensors (m, n) and the factor of each. It is never formed as a whole."""


def generator(*numbers: int) -> torch.Generator:
    """A generator on the CPU, seeded by the numbers in order; torch's global one isn't used."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 0x9E3779B9) % (1 << 62)
    return torch.Generator().manual_seed(seed)


def directions(columns: int, sketch_dim: int, draw: torch.Generator, like: Tensor) -> Tensor:
    """V^T / sqrt(r), (r, n), of independent N(0, 1), of the type and on the device of ``like``.

    E ||V^T x / sqrt(r)||^2 = ||x||^2 for each row x: a sketch keeps norms on average, with a
    relative standard deviation of sqrt(2 / r). More ``columns`` begin with the same ones.
    """
    # torch draws normal numbers 16 at a time, and draws the last 16 again for any other length.
    shape = -(-columns // 16) * 16, sketch_dim
    v = torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")
    scaled = v[:columns].t().mul(1.0 / math.sqrt(sketch_dim))
    return scaled.contiguous().to(like.device, like.dtype)


def sketch(parts: Parts, v: Tensor) -> Tensor:
    """(G V / sqrt(r))^T, (r, m), of a matrix G (m, n) as a sum, in one pass over each part."""
    (first, factor), *rest = parts
    out = torch.mm(v, first.t())
    if factor != 1.0:
        out.mul_(factor)
    for tensor, factor in rest:
        out.addmm_(v, tensor.t(), alpha=factor)
    return out


def scores(sketch: Tensor) -> Tensor:
    """The squared norm (m,) of each row's sketch (r, m) of all ranks, up to a common factor.

    It is relative to the largest entry, so that no square overflows, and none that counts vanishes.
    """
    # Not a norm over a dimension: the library chooses in which order that adds.
    largest = sketch.abs().max()
    scaled = sketch / largest if float(largest) > 0 else sketch
    total: Tensor = scaled[0] * scaled[0]
    for i in range(1, len(scaled)):
        total += scaled[i] * scaled[i]
    return total


def row_scores(parts: Parts) -> Tensor:
    (first, factor), *rest = parts
    total = first if not rest and factor == 1.0 else first * factor
    for tensor, factor in rest:
        total = total.add_(tensor, alpha=factor)
    norms: Tensor = torch.linalg.vector_norm(total, dim=1)
    return norms * norms


def best(scores: Tensor, k: int) -> Tensor:
    """The rows of the ``k`` highest scores, int64 ascending; of equal ones the first."""
    if k >= len(scores):
        return torch.arange(len(scores), device=scores.device)
    border = torch.topk(scores, k, sorted=True).values[-1]
    if bool(border.isnan()):
        above = scores.isnan()
        return above.nonzero().view(-1)[:k]
    above = scores.isnan() | (scores > border)
    equal = (scores == border).nonzero().view(-1)
    missing = k - int(above.sum())
    above[equal[:missing]] = True
    return above.nonzero().view(-1)


def random_rows(rows: int, k: int, draw: torch.Generator) -> Tensor:
    return torch.randperm(rows, generator=draw, device="cpu")[:k].sort().values
