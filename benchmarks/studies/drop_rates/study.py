"""What dropped micro-batches cost a model: ``python -m benchmarks drop_rates --report docs``.

Ranks' micro-batches take as long as the paper's simulated delay says, and end at the threshold that
drops a given share of them. The mean of what is left is computed in one process, as a sum over all
ranks would be; so nothing but the share and the divisor differs between runs of a seed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.common.delays import Delayed
from benchmarks.common.results import Piece, Result
from benchmarks.common.runner import Study, one_by_one
from benchmarks.common.tables import markdown, publish
from benchmarks.studies.quality.statistics import Estimate, estimate
from benchmarks.studies.quality.tasks import TASKS, cross_entropy, judge
from lossycoll.simulate.times import Times

RANKS, MICRO_BATCHES = 4, 8
RATES: Final = (0.0, 0.02, 0.05, 0.1, 0.2)
COMPLETED, FIXED = "completed", "fixed"
SEEDS: Final[Mapping[str, int]] = {"digits": 24, "gpt": 6}
"""Digits are learned in a second, so they have more seeds than the GPT."""
SAMPLES = 20_000
"""Steps of a rank by which a threshold is found."""


@dataclass(frozen=True)
class Run(Piece):
    """One training; without drops divisors are the same."""

    task: str
    divisor: str
    rate: float
    seed: int

    @property
    def base(self) -> Run:
        """What it is compared with."""
        return replace(self, divisor=COMPLETED, rate=0.0)


def runs(tasks: Sequence[str]) -> Iterator[Run]:
    """Seed by seed."""
    for task in tasks:
        for seed in range(1, SEEDS[task] + 1):
            yield Run(task, COMPLETED, 0.0, seed)
            for rate in RATES[1:]:
                yield from (Run(task, divisor, rate, seed) for divisor in (COMPLETED, FIXED))


def completed(seconds: Times, threshold: float) -> Times:
    """Which micro-batches count, of times (..., micro-batches): all that end by the threshold, and
    each rank's first one."""
    there: Times = np.cumsum(seconds, -1) <= threshold
    there[..., 0] = True
    return there


@cache
def threshold_of(rate: float) -> float:
    """Seconds of compute, a micro-batch without its delay being 1, after which a share of ``rate``
    is left out."""
    if not rate:
        return math.inf
    seconds = Delayed().draw(np.random.default_rng(11), (SAMPLES, MICRO_BATCHES))
    low, high = 1.0, float(seconds.sum(-1).max())
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if 1 - completed(seconds, middle).mean() > rate else (low, middle)
        )
    return high


def mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor, there: Tensor) -> Tensor:
    """The mean loss over the micro-batches of all ranks that count, bool (ranks * micro-batches,).

    Its gradient is that of the sum over them, divided by their number.
    """
    kept = there.repeat_interleave(len(inputs) // len(there))
    return cross_entropy(model(inputs[kept]), targets[kept])


def train(run: Run, options: argparse.Namespace) -> dict[str, float]:
    """Loss and right answers on held-out data, and the share that was dropped."""
    del options
    torch.set_num_threads(1)
    task = TASKS[run.task]()
    torch.manual_seed(run.seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters(), lr=task.learning_rate, **task.defaults)
    draw = torch.Generator().manual_seed(run.seed)
    shape = (task.steps, RANKS, MICRO_BATCHES)
    seconds = Delayed().draw(np.random.default_rng([run.seed, 3]), shape)
    there = torch.from_numpy(completed(seconds, threshold_of(run.rate))).flatten(1)
    for step in range(task.steps):
        for group in optimizer.param_groups:
            group["lr"] = task.rate(step)
        loss = mean_loss(model, *task.draw(draw), there[step])
        if run.divisor == FIXED:
            loss = loss * there[step].double().mean().item()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    total, right, count = judge(model, task.held_out).tolist()
    return {
        "loss": total / count,
        "accuracy": right / count,
        "dropped": 1 - there.double().mean().item(),
    }


def loss_change(figures: Mapping[str, float], base: Mapping[str, float]) -> float:
    return 100 * math.expm1(figures["loss"] - base["loss"])


def accuracy_change(figures: Mapping[str, float], base: Mapping[str, float]) -> float:
    return 100 * (figures["accuracy"] - base["accuracy"])


Change = Callable[[Mapping[str, float], Mapping[str, float]], float]


def compared(results: Sequence[Result], task: str, change: Change) -> dict[tuple[str, float], Any]:
    """Paired differences, by divisor and rate; ("", rate) is the fixed divisor against the other
    one."""
    found = {Run.of(one.settings): one.figures for one in results}
    pairs: dict[tuple[str, float], list[float]] = {}
    for run, figures in found.items():
        if run.task != task or not run.rate or run.base not in found:
            continue
        pairs.setdefault((run.divisor, run.rate), []).append(change(figures, found[run.base]))
        other = replace(run, divisor=COMPLETED)
        if run.divisor == FIXED and other in found:
            pairs.setdefault(("", run.rate), []).append(change(figures, found[other]))
    return {key: estimate(values) for key, values in pairs.items()}


def shown(found: Estimate | None, digits: int) -> str:
    """In bold where the interval is without 0."""
    if found is None:
        return "-"
    half = "" if found.half is None else f" ± {found.half:.{digits}f}"
    text = f"{found.mean:+.{digits}f}{half}"
    return f"**{text}**" if found.low > 0 or found.high < 0 else text


def table(results: Sequence[Result]) -> str:
    """A line for each task and rate."""
    lines = []
    for task in SEEDS:
        mine = [one for one in results if one.settings["task"] == task]
        loss, right = (compared(mine, task, one) for one in (loss_change, accuracy_change))
        for rate in RATES[1:]:
            runs_of = [one.figures for one in mine if one.settings["rate"] == rate]
            if not runs_of:
                continue
            dropped = sum(figures["dropped"] for figures in runs_of) / len(runs_of)
            seeds = loss[COMPLETED, rate].n
            keys = ((COMPLETED, rate), (FIXED, rate), ("", rate))
            lines.append([
                *(task, f"{seeds}", f"{100 * dropped:.1f}%"),
                *(shown(loss.get(key), 2) for key in keys),
                *(shown(right.get(key), 2) for key in keys[:2]),
            ])  # fmt: skip
    head = (
        *("task", "seeds", "dropped", "perplexity, %, by completed", "by all"),
        *("by all less by completed", "right answers, points, by completed", "by all"),
    )
    return markdown(head, lines)


def report(results: Sequence[Result], folder: Path) -> str:
    """Fills the table of dropcompute.md, and writes all figures as JSON."""
    text = table(results)
    rows = [{**r.settings, **r.figures} for r in results]
    publish(folder, "drop_rates", rows, "dropcompute.md", {"drop-rates": text})
    return text


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="+", choices=list(SEEDS), default=list(SEEDS))


STUDY: Final = Study(
    name="drop_rates",
    description=__doc__ or "",
    arguments=_arguments,
    plan=lambda options: list(runs(options.tasks)),
    measuring=one_by_one(train),
    alike=lambda run: run.task,
    report=report,
    report_help="folder of dropcompute.md, for the table and the JSON",
)
