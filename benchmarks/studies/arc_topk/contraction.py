"""Is ARC-Top-K a contraction? ``E |x - C(x)|^2 <= (1 - K / m) |x|^2``, for real gradients.

Rows are chosen by the sketch of the mean gradient. So this is asked of the mean of all ranks'
gradients, and of what single ranks compress: rows that matter to one rank may not matter to the
mean.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.studies.quality.tasks import Task, cross_entropy
from lossycoll.train.compress import selection

from .forms import kind
from .tasks import TASKS

RATIOS: Final = (0.05, 0.1, 0.2)
RANKS, SKETCH_DIM, DRAWS = 4, 4, 64
STEPS, EVERY = 60, 10
OF_MEAN, OF_RANK = "the mean", "a rank's own"


def rank_gradients(task: Task, steps: int, every: int, seed: int = 1) -> list[list[Tensor]]:
    """At every ``every``-th step, of each parameter of two or more dimensions, (ranks, rows,
    columns): ranks have a share of the batch each, as DDP's."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters(), lr=task.learning_rate, **task.defaults)
    draw = torch.Generator().manual_seed(seed)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    out = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = task.rate(step)
        optimizer.zero_grad()
        inputs, targets = task.draw(draw)
        found = []
        for part, wanted in zip(inputs.chunk(RANKS), targets.chunk(RANKS), strict=True):
            loss = cross_entropy(model(part), wanted) / RANKS
            before = [None if p.grad is None else p.grad.clone() for p in matrices]
            loss.backward()  # type: ignore[no-untyped-call]
            found.append([_added(p, b) for p, b in zip(matrices, before, strict=True)])
        if step % every == every - 1:
            out.append([RANKS * torch.stack(own) for own in zip(*found, strict=True)])
        optimizer.step()
    return out


def _added(parameter: Tensor, before: Tensor | None) -> Tensor:
    """The gradient that the last backward pass has added, (rows, columns)."""
    assert parameter.grad is not None
    grad = parameter.grad if before is None else parameter.grad - before
    return grad.flatten(1).clone()


def kept(own: Tensor, ratio: float, draws: int = DRAWS) -> tuple[Tensor, float]:
    """The shares of energy that C keeps, (draws, 1 + ranks), of the mean and of each rank; K / m.

    ``own``: the ranks' gradients, (ranks, rows, columns).
    """
    mean = own.mean(0)
    k = selection.kept_rows(len(mean), ratio)
    energy = torch.cat([mean[None], own]).double().square().sum(2)  # (1 + ranks, rows)
    shares = []
    for seed in range(draws):
        v = selection.directions(mean.shape[1], SKETCH_DIM, selection.generator(seed), mean)
        index = selection.best(selection.scores(selection.sketch([(mean, 1.0)], v)), k)
        shares.append(energy[:, index].sum(1) / energy.sum(1).clamp_min(1e-300))
    return torch.stack(shares), k / len(mean)


def contractions(name: str, draws: int = DRAWS) -> list[dict[str, Any]]:
    """Of each gradient and ratio of a task: K / m, and what is kept with its standard error; of a
    rank's own that of the rank that keeps least."""
    rows = []
    for number, gradients in enumerate(rank_gradients(TASKS[name](), STEPS, EVERY)):
        for place, own in enumerate(gradients):
            shape = own.shape[1:]
            what = "conv" if name == "conv" and place < 3 else kind(name, own[0], place)
            for ratio in RATIOS:
                shares, least = kept(own, ratio, draws)
                means, errors = shares.mean(0), shares.std(0) / math.sqrt(draws)
                worst = 1 + int(means[1:].argmin())
                for of, at in ((OF_MEAN, 0), (OF_RANK, worst)):
                    rows.append({
                        **{"task": name, "kind": what, "step": EVERY * (number + 1)},
                        **{"rows": shape[0], "ratio": ratio, "of": of, "least": least},
                        **{"kept": float(means[at]), "error": float(errors[at])},
                    })  # fmt: skip
    return rows


def measure_contraction() -> list[dict[str, Any]]:
    """By kind of parameter, ratio, and whose gradient: the least of what is kept over K / m, its
    mean, and how many are below by more than four standard errors."""
    by: dict[tuple[str, float, str], list[dict[str, Any]]] = defaultdict(list)
    for name in TASKS:
        for row in contractions(name):
            by[row["kind"], row["ratio"], row["of"]].append(row)
    return [
        {
            **{"kind": what, "ratio": ratio, "of": of, "gradients": len(rows)},
            "kept": sum(row["kept"] for row in rows) / len(rows),
            "least": min(row["kept"] / row["least"] for row in rows),
            "below": sum(row["kept"] + 4 * row["error"] < row["least"] for row in rows),
        }
        for (what, ratio, of), rows in sorted(by.items())
    ]
