"""Chooses the rows of a matrix that are sent: sketch, scores, the K best (arXiv 2510.26709).

All ranks must choose the same rows. So they compute from what they all have, bit for bit, in
operations for which IEEE 754 defines every bit: products, sums in a stated order, comparisons.
Ranks on different processors, whose libraries may round long sums differently, still agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Parts = Sequence[tuple[Tensor, float]]
"""A matrix as a sum: tensors (m, n) and the factor of each. It is never formed as a whole."""


def generator(*numbers: int) -> torch.Generator:
    """Makes a generator of random numbers; torch's global one is not used.

    Args:
        numbers: Its seed; other numbers, or another order of them, make another generator.

    Returns:
        The generator, on the CPU.
    """
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 0x9E3779B9) % (1 << 62)
    return torch.Generator().manual_seed(seed)


def directions(columns: int, sketch_dim: int, draw: torch.Generator, like: Tensor) -> Tensor:
    """V^T / sqrt(r) of independent N(0, 1).

    E ||V^T x / sqrt(r)||^2 = ||x||^2 for each row x: a sketch keeps norms on average, with a
    relative standard deviation of sqrt(2 / r). More ``columns`` begin with the same ones.

    Args:
        columns: n, the length of a row.
        sketch_dim: r, numbers of a row's sketch.
        draw: The generator, in the same state on all ranks.
        like: Has the type and the device that are wanted.

    Returns:
        (r, n).
    """
    # torch draws normal numbers 16 at a time, and draws the last 16 again for any other length.
    v = torch.randn(-(-columns // 16) * 16, sketch_dim, generator=draw, dtype=torch.float32)
    scaled = v[:columns].t().mul(1.0 / math.sqrt(sketch_dim))
    return scaled.contiguous().to(like.device, like.dtype)


def sketch(parts: Parts, v: Tensor) -> Tensor:
    """(G V / sqrt(r))^T of a matrix G, in one pass over each part of it.

    Args:
        parts: G, (m, n), as a sum.
        v: (r, n), what :func:`directions` returned.

    Returns:
        (r, m), one column for each row of G.
    """
    (first, factor), *rest = parts
    out = torch.mm(v, first.t())
    if factor != 1.0:
        out.mul_(factor)
    for tensor, factor in rest:
        out.addmm_(v, tensor.t(), alpha=factor)
    return out


def scores(sketch: Tensor) -> Tensor:
    """The squared norm of each row's sketch, up to a common factor.

    It is relative to the largest entry, so that no square overflows, and none that counts vanishes.

    Args:
        sketch: (r, m), summed over the ranks.

    Returns:
        (m,), by row.
    """
    # Not a norm over a dimension: the library chooses in which order that adds.
    largest = sketch.abs().max()
    scaled = sketch / largest if float(largest) > 0 else sketch
    total: Tensor = scaled[0] * scaled[0]
    for i in range(1, len(scaled)):
        total += scaled[i] * scaled[i]
    return total


def row_scores(parts: Parts) -> Tensor:
    """The squared norm of each row; exact, of this rank alone.

    Args:
        parts: A matrix (m, n) as a sum.

    Returns:
        (m,), by row.
    """
    (first, factor), *rest = parts
    total = first if not rest and factor == 1.0 else first * factor
    for tensor, factor in rest:
        total = total.add_(tensor, alpha=factor)
    norms: Tensor = torch.linalg.vector_norm(total, dim=1)
    return norms * norms


def best(scores: Tensor, k: int) -> Tensor:
    """The rows of the highest scores; of equal ones the first. NaN counts as highest.

    Args:
        scores: (m,), by row.
        k: How many are wanted.

    Returns:
        int64 (min(k, m),), ascending.
    """
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
    """Draws rows, each set of them equally likely.

    Args:
        rows: m, all rows.
        k: How many are wanted.
        draw: The generator, in the same state on all ranks.

    Returns:
        int64 (k,), ascending.
    """
    return torch.randperm(rows, generator=draw)[:k].sort().values
