"""When in a training loss costs most: ``python -m benchmarks phases --report docs``.

4 replicas train with 40% of the packets lost in one third of the steps, in all, or in none; nothing
is resent, and there is no parity. Replicas run in turn in one process, with losses by the engine's
own functions, as in the study of large models.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from benchmarks.common.results import Piece, Result
from benchmarks.common.runner import Study, one_by_one
from benchmarks.common.tables import markdown, publish
from benchmarks.studies.drop_rates.study import shown
from benchmarks.studies.large.exchange import Exchange
from benchmarks.studies.large.replicas import RELIABLE, Replicas
from benchmarks.studies.quality.statistics import Estimate, estimate
from benchmarks.studies.quality.tasks import TASKS, Task, cross_entropy, judge
from lossycoll.plan.faults import Inject

WORLD, LOSS, PAYLOAD = 4, 0.4, 1408
BUCKET_ELEMENTS = 25 << 18
NONE, ALL = "none", "all"
THIRDS: Final = ("first", "second", "last")
COSINE, CONSTANT = "cosine", "constant"
PLANNED: Final = {
    ("digits", COSINE): (("ddp+driftbound", "sharded"), 6),
    ("digits", CONSTANT): (("ddp+driftbound", "sharded"), 6),
    ("gpt", COSINE): (("ddp+driftbound", "sharded"), 6),
}
"""Methods and seeds, by task and how the learning rate goes on after its warm-up."""


@dataclass(frozen=True)
class Run(Piece):
    """One training; ``lost``: the third in which packets are lost, or "none" or "all"."""

    task: str
    rate: str
    method: str
    lost: str
    seed: int

    @property
    def base(self) -> Run:
        """What it is compared with."""
        return replace(self, method=RELIABLE, lost=NONE)

    def lossy_at(self, step: int, steps: int) -> bool:
        """Whether packets are lost in a step, 0 first, of so many."""
        return self.lost == ALL or self.lost == THIRDS[3 * step // steps]


def runs() -> Iterator[Run]:
    """Seed by seed."""
    for (task, rate), (methods, seeds) in PLANNED.items():
        for seed in range(1, seeds + 1):
            yield Run(task, rate, RELIABLE, NONE, seed)
            for method in methods:
                yield from (Run(task, rate, method, lost, seed) for lost in (*THIRDS, ALL))


def rate_of(task: Task, how: str, step: int) -> float:
    """The learning rate of a step, half of the task's highest at most; or that after a warm-up."""
    half = task.learning_rate / 2
    if how == COSINE:
        return min(task.rate(step), half)
    return half * min(1.0, (step + 1) / max(1, task.steps // 10))


def train(run: Run, options: argparse.Namespace) -> dict[str, float]:
    """The mean loss and share of right answers of all replicas on held-out data."""
    del options
    torch.set_num_threads(1)
    task = TASKS[run.task]()
    torch.manual_seed(run.seed)
    clean = Inject(seed=run.seed)
    exchange = Exchange(
        *(WORLD, clean, PAYLOAD), rounds=None if run.method == RELIABLE else 0, order_seed=run.seed
    )
    replicas = Replicas(
        run.method,
        task.model,
        lambda owned: task.optimizer(owned, lr=task.learning_rate, **task.defaults),
        exchange,
        BUCKET_ELEMENTS,
        torch.device("cpu"),
    )
    draw = torch.Generator().manual_seed(run.seed)
    lossy = replace(clean, loss=LOSS)
    for step in range(task.steps):
        exchange.inject = lossy if run.lossy_at(step, task.steps) else clean
        inputs, targets = task.draw(draw)
        for rank, model in enumerate(replicas.models):
            loss = cross_entropy(model(inputs.chunk(WORLD)[rank]), targets.chunk(WORLD)[rank])
            loss.backward()  # type: ignore[no-untyped-call]
        replicas.step(rate_of(task, run.rate, step))
    total, right, count = torch.stack([judge(m, task.held_out) for m in replicas.models]).sum(0)
    traffic = exchange.traffic
    return {
        "loss": float(total / count),
        "accuracy": float(right / count),
        "missing": traffic.missing / max(1, traffic.packets),
        "drift": replicas.drift(),
    }


Key = tuple[str, str, str, str]
"""Task, rate, method, lost."""


def compared(results: Sequence[Result]) -> dict[Key, Estimate]:
    """Changes of perplexity in %; "last less first" is a pair's difference of those."""
    found = {Run.of(one.settings): one.figures for one in results}
    changes = {
        run: 100 * math.expm1(figures["loss"] - found[run.base]["loss"])
        for run, figures in found.items()
        if run.base in found and run != run.base
    }
    values: dict[Key, list[float]] = {}
    for run, change in changes.items():
        values.setdefault((run.task, run.rate, run.method, run.lost), []).append(change)
        first = replace(run, lost=THIRDS[0])
        if run.lost == THIRDS[-1] and first in changes:
            key = (run.task, run.rate, run.method, "difference")
            values.setdefault(key, []).append(change - changes[first])
    return {key: estimate(one) for key, one in values.items()}


def table(results: Sequence[Result]) -> str:
    """A line for each task, rate and method."""
    found = compared(results)
    lines = []
    for (task, rate), (methods, _) in PLANNED.items():
        for method in methods:
            cells = {
                lost: found.get((task, rate, method, lost)) for lost in (*THIRDS, ALL, "difference")
            }
            if any(cells.values()):
                seeds = max(cell.n for cell in cells.values() if cell)
                lines.append([
                    *(task, rate, method, f"{seeds}"),
                    *(shown(cell, 1) for cell in cells.values()),
                ])  # fmt: skip
    head = ("task", "learning rate", "method", "seeds", *(f"{third} third" for third in THIRDS))
    return markdown((*head, "all steps", "last less first"), lines)


def report(results: Sequence[Result], folder: Path) -> str:
    """Fills the table of quality.md, and writes all figures as JSON."""
    text = table(results)
    rows = [{**r.settings, **r.figures} for r in results]
    publish(folder, "phases", rows, "quality.md", {"phases": text})
    return text


STUDY: Final = Study(
    name="phases",
    description=__doc__ or "",
    plan=lambda options: list(runs()),
    measuring=one_by_one(train),
    alike=lambda run: (run.task, run.method),
    report=report,
    report_help="folder of quality.md, for the table and the JSON",
)
