"""What dropped micro-batches cost a model: ``python -m benchmarks drop_rates --report docs``.

Ranks' micro-batches take as long as the paper's simulated delay says, and end at the threshold that
drops a given share of them. The mean of what is left is computed in one process, as a sum over all
ranks would be; so nothing but the share and the divisor differs between runs of a seed.

Other runs take local steps, each rank with a model of its own. Every fourth step, all have the mean
of their parameters, by equal weights or by the ranks' samples, as in a swarm.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.common.delays import Delayed
from benchmarks.common.results import Piece, Result
from benchmarks.common.runner import Study, one_by_one
from benchmarks.common.tables import markdown, publish
from benchmarks.studies.quality.statistics import Estimate, estimate
from benchmarks.studies.quality.tasks import TASKS, Task, cross_entropy, judge
from lossycoll.simulate.times import Times

RANKS, MICRO_BATCHES = 4, 8
RATES: Final = (0.0, 0.02, 0.05, 0.1, 0.2)
COMPLETED, FIXED, LOCAL, SWARM = "completed", "fixed", "local", "swarm"
PAIRS: Final = {FIXED: COMPLETED, SWARM: LOCAL}
"""Ways that are the same without drops, each with the one that is its base."""
LOCAL_STEPS = 4
SEEDS: Final[Mapping[str, int]] = {"digits": 24, "gpt": 6}
"""Digits are learned in a second, so they have more seeds than the GPT."""
SAMPLES = 20_000
"""Steps of a rank by which a threshold is found."""


@dataclass(frozen=True)
class Run(Piece):
    """One training. ``divisor``: of the sum, or which mean follows local steps."""

    task: str
    divisor: str
    rate: float
    seed: int

    @property
    def base(self) -> Run:
        """What it is compared with."""
        return replace(self, divisor=PAIRS.get(self.divisor, self.divisor), rate=0.0)


def runs(tasks: Sequence[str]) -> Iterator[Run]:
    """Seed by seed."""
    for task in tasks:
        for seed in range(1, SEEDS[task] + 1):
            for other, base in PAIRS.items():
                yield Run(task, base, 0.0, seed)
                for rate in RATES[1:]:
                    yield from (Run(task, divisor, rate, seed) for divisor in (base, other))


def completed(seconds: Times, threshold: float) -> NDArray[np.bool_]:
    """Which micro-batches count, of times (..., micro-batches): all that end by the threshold, and
    each rank's first one."""
    there: NDArray[np.bool_] = np.cumsum(seconds, -1) <= threshold
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
    is_local = run.divisor in (LOCAL, SWARM)
    replicas = [Replica(task, copy.deepcopy(model)) for _ in range(RANKS if is_local else 1)]
    draw = torch.Generator().manual_seed(run.seed)
    shape = (task.steps, RANKS, MICRO_BATCHES)
    seconds = Delayed().draw(np.random.default_rng([run.seed, 3]), shape)
    there = torch.from_numpy(completed(seconds, threshold_of(run.rate))).flatten(1)
    for step in range(task.steps):
        parts = (part.chunk(len(replicas)) for part in (*task.draw(draw), there[step]))
        for replica, inputs, targets, kept in zip(replicas, *parts, strict=True):
            scale = kept.double().mean().item() if run.divisor == FIXED else 1.0
            replica.step(task.rate(step), scale * mean_loss(replica.model, inputs, targets, kept))
            replica.samples += int(kept.sum())
        if is_local and (step + 1) % LOCAL_STEPS == 0:
            average(replicas, run.divisor == SWARM)
    if is_local:
        average(replicas, run.divisor == SWARM)  # where steps are left over
    total, right, count = judge(replicas[0].model, task.held_out).tolist()
    return {
        "loss": total / count,
        "accuracy": right / count,
        "dropped": 1 - there.double().mean().item(),
    }


class Replica:
    """One rank's model and optimizer, and its micro-batches since the latest mean."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.model, self.samples = model, 0
        self.optimizer = task.optimizer(model.parameters(), lr=task.learning_rate, **task.defaults)

    def step(self, rate: float, loss: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


@torch.no_grad()
def average(replicas: Sequence[Replica], by_samples: bool) -> None:
    """Gives all the mean of their parameters. Optimizers keep their own state."""
    weights = [one.samples if by_samples else 1 for one in replicas]
    if not any(weights):
        return  # no step since the latest
    for same in zip(*(one.model.parameters() for one in replicas), strict=True):
        parts = [weight * each for weight, each in zip(weights, same, strict=True)]
        mean = torch.stack(parts).sum(0) / sum(weights)
        for each in same:
            each.copy_(mean)
    for one in replicas:
        one.samples = 0


def loss_change(figures: Mapping[str, float], base: Mapping[str, float]) -> float:
    return 100 * math.expm1(figures["loss"] - base["loss"])


def accuracy_change(figures: Mapping[str, float], base: Mapping[str, float]) -> float:
    return 100 * (figures["accuracy"] - base["accuracy"])


Change = Callable[[Mapping[str, float], Mapping[str, float]], float]


def compared(results: Sequence[Result], task: str, change: Change) -> dict[tuple[str, float], Any]:
    """Paired differences, by divisor and rate; ("less " + divisor, rate) is the one of PAIRS that
    has it as its base, against it."""
    found = {Run.of(one.settings): one.figures for one in results}
    pairs: dict[tuple[str, float], list[float]] = {}
    for run, figures in found.items():
        if run.task != task or not run.rate or run.base not in found:
            continue
        pairs.setdefault((run.divisor, run.rate), []).append(change(figures, found[run.base]))
        if run.divisor in PAIRS:
            other = replace(run, divisor=PAIRS[run.divisor])
            if other in found:
                key = (f"less {other.divisor}", run.rate)
                pairs.setdefault(key, []).append(change(figures, found[other]))
    return {key: estimate(values) for key, values in pairs.items()}


def shown(found: Estimate | None, digits: int) -> str:
    """In bold where the interval is without 0."""
    if found is None:
        return "-"
    half = "" if found.half is None else f" ± {found.half:.{digits}f}"
    text = f"{found.mean:+.{digits}f}{half}"
    return f"**{text}**" if found.low > 0 or found.high < 0 else text


def table(results: Sequence[Result], other: str = FIXED) -> str:
    """A line for each task and rate. ``other``: of PAIRS."""
    lines, base = [], PAIRS[other]
    for task in SEEDS:
        mine = [one for one in results if one.settings["task"] == task]
        loss, right = (compared(mine, task, one) for one in (loss_change, accuracy_change))
        for rate in RATES[1:]:
            if (base, rate) not in loss:
                continue
            shares = [
                one.figures["dropped"]
                for one in mine
                if one.settings["rate"] == rate and one.settings["divisor"] in (base, other)
            ]
            dropped = sum(shares) / len(shares)
            keys = ((base, rate), (other, rate), (f"less {base}", rate))
            lines.append([
                *(task, f"{loss[base, rate].n}", f"{100 * dropped:.1f}%"),
                *(shown(loss.get(key), 2) for key in keys),
                *(shown(right.get(key), 2) for key in keys[:2]),
            ])  # fmt: skip
    by, of = HEADS[other]
    head = (
        *("task", "seeds", "dropped", f"perplexity, %, {by}", of),
        *(f"{of} less {by}", f"right answers, points, {by}", of),
    )
    return markdown(head, lines)


HEADS: Final = {
    FIXED: ("by completed", "by all"),
    SWARM: ("by equal weights", "by samples"),
}


def report(results: Sequence[Result], folder: Path) -> str:
    """Fills the tables of dropcompute.md, and writes all figures as JSON."""
    tables = {"drop-rates": table(results), "drop-rates-local": table(results, SWARM)}
    rows = [{**r.settings, **r.figures} for r in results]
    publish(folder, "drop_rates", rows, "dropcompute.md", tables)
    return "\n".join(tables.values())


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="+", choices=list(SEEDS), default=list(SEEDS))


STUDY: Final = Study(
    name="drop_rates",
    description=__doc__ or "",
    arguments=_arguments,
    plan=lambda options: list(runs(options.tasks)),
    measuring=one_by_one(train),
    alike=lambda run: (run.task, run.base.divisor),
    report=report,
    report_help="folder of dropcompute.md, for the table and the JSON",
)
