"""The runs of the study, as data, in the order of their importance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lossycoll.cli.argtypes import inject_text

TASKS = ("gpt", "digits")
WORLDS = (4, 8)
KINDS = ("single", "bursty", "uneven")
BASE = "reliable"
# No arm against loss: nothing is lost, but the batch is smaller by as much as makes the gradient as
# noisy as the mean of what arrives. What that costs, no way of averaging what arrives can save.
CONTROL = "smaller-batch"
# DriftBound over a group made with repair=0, whose gradients are those that came the first time.
UNREPAIRED = "ddp+driftbound/repair0"
METHODS = ("ddp+driftbound", "sharded")
ARMS = ("zero-fill", "own-gradient", "ddp", UNREPAIRED, *METHODS, CONTROL)
# What was tried to improve the two methods: with 4 ranks and single losses that have a goal.
VARIANTS = (
    "sharded/published",
    "sharded/repair0",
    "sharded/repair0/age1",
    "sharded/repair0/age0",
    "sharded/feedback",
    "sharded/repair1",
    "ddp+driftbound/repair0/period4",
    "ddp+driftbound/repair1",
)
# They differ from "sharded" where much is lost: there also with 8 ranks and bursts.
AGE_RULES = ("sharded/age0", "sharded/age3")
# What is lost is spread over the whole tensor: with 4 ranks, the second where most is lost, and
# there also with 8.
DISPERSED = ("ddp+driftbound/repair0/dispersed", "ddp+driftbound/dispersed")
# The three losses that have a goal come first.
LOSSES = (0.1, 0.2, 0.4, 0.3)
BURST = 8
UNEVEN_FACTOR = 3
UNEVEN_MOST = 0.9
# Arms that should be the reliable one when nothing is lost; the other two then are "ddp".
AT_NO_LOSS = ("ddp", *METHODS)
# What has a goal: at most so much of perplexity, in %, by loss.
GOALS = {0.1: 0.4, 0.2: 1.0, 0.4: 3.0}
GOAL_KINDS = KINDS[:2]
FULL_SEEDS = 3
"""Further seeds are only for the methods where there is a goal, whose differences are the least."""


@dataclass(frozen=True, order=True)
class Run:
    """One training run. ``loss``: share of packets dropped on average over the links."""

    task: str
    world: int
    kind: str
    loss: float
    arm: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.task}/{self.world}/{self.kind}/{self.loss:g}/{self.arm}/{self.seed}"

    @property
    def base(self) -> Run:
        """What it is compared with: nothing lost, same ranks, same seed."""
        return Run(self.task, self.world, "none", 0.0, BASE, self.seed)

    @property
    def cell(self) -> tuple[str, int, str, float, str]:
        """The runs that differ in nothing but their seed."""
        return self.task, self.world, self.kind, self.loss, self.arm

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def faults(run: Run) -> str:
    """The option ``inject`` of a run."""
    if run.arm == CONTROL:
        return ""
    links: dict[tuple[int, int], float] = {}
    loss = run.loss
    if run.kind == "uneven":
        loss, bad = uneven(run.loss, run.world)
        links = {(0, 1): bad, (1, 0): bad}
    return inject_text(loss, BURST if run.kind == "bursty" else 1, run.seed, links) or ""


def batch_share(run: Run) -> float:
    """The share of the batch that a run trains with: the control's is the inverse of the variance
    that loss adds, (1 - p^N) / (1 - p), so that both have the same."""
    if run.arm != CONTROL:
        return 1.0
    return (1 - run.loss) / (1 - run.loss**run.world)


def uneven(loss: float, world: int) -> tuple[float, float]:
    """(loss of the other links, loss between ranks 0 and 1 in both directions).

    The bad link loses three times the average, at most UNEVEN_MOST. The others lose as much less as
    keeps the average over all links at ``loss``: what differs from even loss is the unevenness.
    """
    bad = round(min(UNEVEN_FACTOR * loss, UNEVEN_MOST), 6)
    links = world * (world - 1)
    return round((links * loss - 2 * bad) / (links - 2), 6), bad


def runs(seeds: Sequence[int]) -> Iterator[Run]:
    """Every run, the most important first; seeds outermost, so that a part is a whole study."""
    for seed in seeds:
        if seed > FULL_SEEDS:
            yield from _with_goals(seed)
            continue
        for world in WORLDS:
            for kind in KINDS:
                for loss in LOSSES:
                    for task in TASKS:
                        if kind == KINDS[0] and loss == LOSSES[0]:
                            yield Run(task, world, "none", 0.0, BASE, seed)
                        for arm in ARMS:
                            if arm != CONTROL or kind == KINDS[0]:
                                yield Run(task, world, kind, loss, arm, seed)
        for loss in GOALS:
            for arm in (*VARIANTS, *AGE_RULES):
                yield Run(TASKS[0], WORLDS[0], KINDS[0], loss, arm, seed)
            for kind in GOAL_KINDS:
                for arm in DISPERSED if loss == max(GOALS) else DISPERSED[:1]:
                    yield Run(TASKS[0], WORLDS[0], kind, loss, arm, seed)
        for world, kind in ((WORLDS[0], KINDS[1]), (WORLDS[1], KINDS[0]), (WORLDS[1], KINDS[1])):
            for arm in AGE_RULES:
                yield Run(TASKS[0], world, kind, max(GOALS), arm, seed)
        for kind in GOAL_KINDS:
            yield Run(TASKS[0], WORLDS[1], kind, max(GOALS), DISPERSED[1], seed)
        for world in WORLDS:
            for task in TASKS:
                for arm in AT_NO_LOSS:
                    yield Run(task, world, "none", 0.0, arm, seed)


def _with_goals(seed: int) -> Iterator[Run]:
    for world in WORLDS:
        yield Run(TASKS[0], world, "none", 0.0, BASE, seed)
        for kind in GOAL_KINDS:
            for loss in GOALS:
                for arm in METHODS:
                    yield Run(TASKS[0], world, kind, loss, arm, seed)


def only(all_runs: Sequence[Run], wanted: Sequence[str]) -> list[Run]:
    """The runs that fit every word: ``world=4``, ``arm=ddp,sharded``, ``kind=single``, ...

    Raises ValueError for a name or a value that no run has.
    """
    out = list(all_runs)
    for word in wanted:
        name, equals, values = word.partition("=")
        if not equals or name not in Run.__dataclass_fields__:
            known = ", ".join(Run.__dataclass_fields__)
            raise ValueError(f"{word!r}: wanted NAME=VALUE[,VALUE...], NAME one of {known}")
        known_values = {f"{getattr(run, name)}" for run in all_runs}
        for value in values.split(","):
            if value not in known_values:
                raise ValueError(f"{word!r}: {name} is one of {', '.join(sorted(known_values))}")
        out = [run for run in out if f"{getattr(run, name)}" in values.split(",")]
    return out
