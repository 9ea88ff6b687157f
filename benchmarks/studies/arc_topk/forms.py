"""Which matrix a tensor should be: the energy that is kept of real gradients, for the same bytes.

A form is a tensor's elements in order, cut into rows of so many. Short rows choose finer, but their
sketches cost more: of each form so many rows are kept that sketch and rows together are ``BUDGET``
of the tensor's bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lossycoll.train.compress import selection

from .tasks import TASKS, gradients

BUDGETS = (0.1, 0.2)
DIMS = (1, 2, 4)
DRAWS = 4


def forms(shape: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """(name, columns) of what is tried; columns below 0 are of the matrix turned over, whose rows
    are what lies apart in memory."""
    numel = math.prod(shape)
    yield "first dimension", numel // shape[0]
    yield "all other dimensions", -shape[0]
    if len(shape) > 2:
        window = math.prod(shape[2:])
        yield "two first dimensions", window
        if numel % (2 * shape[-1] ** 2) == 0:
            yield "2 t^2 (the authors' code)", 2 * shape[-1] ** 2
    for columns in (32, 64, 128, 256):
        if numel % columns == 0:
            yield f"rows of {columns}", columns


def kept(gradient: Tensor, columns: int, dim: int, budget: float) -> float | None:
    """The share of the energy that the rows of this form keep, or None where the sketch alone is
    dearer than ``budget``."""
    turned = columns < 0
    columns = abs(columns)
    matrix = gradient.flatten(1).t().contiguous() if turned else gradient.reshape(-1, columns)
    rows = len(matrix)
    k = int((budget - dim / columns) * rows)
    if k < 1:
        return None
    energy = matrix.square().sum(1)
    found = 0.0
    for seed in range(DRAWS):
        v = selection.directions(columns, dim, selection.generator(seed), matrix)
        index = selection.best(selection.scores(selection.sketch([(matrix, 1.0)], v)), k)
        found += float(energy[index].sum()) / DRAWS
    return found / max(float(energy.sum()), 1e-30)


def kind(name: str, gradient: Tensor, place: int) -> str:
    if gradient.dim() > 2:
        return "conv"
    return "embedding" if name == "gpt" and place < 2 else "linear"


def measure_forms() -> list[dict[str, Any]]:
    """Means over parameters of a kind and over the training."""
    sums: dict[tuple[str, str, int, float], list[float]] = defaultdict(list)
    missing = set()
    for name, make in TASKS.items():
        for found in gradients(make(), 60, 10):
            for place, gradient in enumerate(found):
                if gradient.numel() < 4096:
                    continue
                for form, columns in forms(tuple(gradient.shape)):
                    for dim in DIMS:
                        for budget in BUDGETS:
                            key = (kind(name, gradient, place), form, dim, budget)
                            share = kept(gradient, columns, dim, budget)
                            if share is None:
                                missing.add(key)
                            else:
                                sums[key].append(share)
    return [
        {"kind": k, "form": f, "sketch_dim": d, "budget": b, "kept": sum(v) / len(v)}
        for (k, f, d, b), v in sorted(sums.items())
        if (k, f, d, b) not in missing
    ]
