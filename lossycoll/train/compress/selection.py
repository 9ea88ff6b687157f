"""Which rows of a matrix are worth sending: sketch, scores, the K best.

What all ranks must agree on is computed from what they all have, bit for bit, in operations of
which IEEE 754 says every bit: products, sums in a stated order, comparisons. So ranks on different
processors, whose libraries may round long sums differently, still choose the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Parts = Sequence[tuple[Tensor, float]]
"""A matrix as a sum: tensors (m, n) and the factor of each. Never added up as a whole."""


def generator(*numbers: int) -> torch.Generator:
    """One of its own for each tuple of ``numbers``, so that torch's global one isn't touched."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 0x9E3779B9) % (1 << 62)
    return torch.Generator().manual_seed(seed)


def directions(columns: int, sketch_dim: int, draw: torch.Generator, like: Tensor) -> Tensor:
    """V^T / sqrt(r), (r, n) of independent N(0, 1), in the type and on the device of ``like``.

    So E ||V^T x / sqrt(r)||^2 = ||x||^2 for each row x: a sketch keeps norms on average, with a
    relative standard deviation of sqrt(2 / r). Of more columns the first are the same ones.
    """
    # torch draws normal numbers 16 at a time, and the last of a length between anew.
    v = torch.randn(-(-columns // 16) * 16, sketch_dim, generator=draw, dtype=torch.float32)
    scaled = v[:columns].t().mul(1.0 / math.sqrt(sketch_dim))
    return scaled.contiguous().to(like.device, like.dtype)


def sketch(parts: Parts, v: Tensor) -> Tensor:
    """(G V / sqrt(r))^T of G, the sum of ``parts``: (r, m). One pass over each part."""
    (first, factor), *rest = parts
    out = torch.mm(v, first.t())
    if factor != 1.0:
        out.mul_(factor)
    for tensor, factor in rest:
        out.addmm_(v, tensor.t(), alpha=factor)
    return out


def scores(sketch: Tensor) -> Tensor:
    """The squared norm of each row's sketch, (m,), from (r, m).

    Not by a norm over a dimension, whose order of additions is the library's own business. Relative
    to the largest entry, so that no square overflows, and none that counts vanishes.
    """
    largest = sketch.abs().max()
    scaled = sketch / largest if float(largest) > 0 else sketch
    total: Tensor = scaled[0] * scaled[0]
    for i in range(1, len(scaled)):
        total += scaled[i] * scaled[i]
    return total


def row_scores(parts: Parts) -> Tensor:
    """The squared norm of each row of the sum of ``parts``, (m,); exact, and this rank's alone."""
    (first, factor), *rest = parts
    total = first if not rest and factor == 1.0 else first * factor
    for tensor, factor in rest:
        total = total.add_(tensor, alpha=factor)
    norms: Tensor = torch.linalg.vector_norm(total, dim=1)
    return norms * norms


def best(scores: Tensor, k: int) -> Tensor:
    """The indices of the ``k`` highest of ``scores`` (m,), ascending, int64; of equal ones the
    first. NaN counts as highest."""
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
    """``k`` of ``rows`` indices, each set equally likely, ascending, int64."""
    return torch.randperm(rows, generator=draw)[:k].sort().values
