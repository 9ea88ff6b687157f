"""The runs of the study, as data, in the order of their importance."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.common.results import Piece
from lossycoll.cli.argtypes import inject_text
from lossycoll.cli.demo.methods import DDP, DRIFT_BOUND, SHARDED, methods

TASKS = ("gpt", "digits")
WORLDS = (4, 8)
KINDS = ("single", "bursty", "uneven")
BASE = "reliable"
# Nothing is lost, but the batch is smaller by as much as makes the gradient as noisy as the mean of
# what arrives. What that costs, no way of averaging what arrives can save.
CONTROL = "smaller-batch"
# DriftBound over a group made with repair=0, whose gradients are those that came the first time.
UNREPAIRED = "ddp+driftbound/repair0"
# What was tried to improve the two methods: with 4 ranks and single losses that have a goal.
TRIED = (
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
# The dial (option max_missing): what is lost may come back by parity and by resending, or by parity
# alone, which has the goals as well.
DIALS = {0.0: "max0", 0.003: "max03", 0.01: "max1", 0.03: "max3", 0.1: "max10"}
DEFAULT_DIAL = 0.01
DIAL_TASKS = ("gpt", "digits", "lstm")
DIAL_LOSS = 0.2
"""Of the table of its settings."""
# A GPT whose streams are long beside bursts, with the dial's default.
LONG_TASK = "gpt-long"
# Where something stays missing, it is spread over the whole tensor as well.
SPREAD_DIALS = (0.01, 0.03, 0.1)
# In few bits, with the GPT and 4 ranks: gradients with DriftBound, where feedback is
# wire_feedback_hook's, and both gradients and parameters with ShardedOptimizer.
WIRES = (
    "wire/bf16",
    "wire/int8",
    "wire/int4",
    "wire/int4/stochastic",
    "wire/int4/feedback",
    "wire/int2/spikes",
    "wire/int2/spikes/feedback",
    "wire/sharded/int8",
    "wire/sharded/int4/feedback",
)
WIRE_LOSSES = (0.0, 0.1)
# The three losses that have a goal come first.
LOSSES = (0.1, 0.2, 0.4, 0.3)
BURSTS = {"bursty": 8, "bursty5": 5}
UNEVEN_FACTOR = 3
UNEVEN_MOST = 0.9
# What has a goal: at most so much of perplexity, in %, by loss.
GOALS = {0.1: 0.4, 0.2: 1.0, 0.4: 3.0}
GOAL_KINDS = KINDS[:2]
SHORT_BURSTS = "bursty5"
ALONE_KINDS = (*GOAL_KINDS, SHORT_BURSTS)
"""Where parity alone has the goals, of all DIAL_TASKS."""
FULL_SEEDS = 3
"""Further seeds are only for the methods where there is a goal, whose differences are the least."""

# Of a 7B model on 64 GPUs at single losses (arXiv 2507.07114), in %. Two columns that don't measure
# the same thing and are not one series: the one of the abstract, and one of validation perplexity.
PAPER = {0.1: 0.8, 0.2: 2.6, 0.3: 3.8}
PAPER_VALIDATION = {0.1: 1.17, 0.4: 6.65}
HEADLINE = "replicas"
"""The models whose figures are shown: all ranks', on average."""


def method_names() -> tuple[str, ...]:
    """The registered methods that do something about loss: all but plain DDP."""
    return tuple(method.name for method in methods() if method != DDP)


def dial(method: str, missing: float, *how: str) -> str:
    """The name of the variant that lets so much be missing. ``how``: "norepair", "dispersed"."""
    return "/".join((method, DIALS[missing], *how))


def dials() -> tuple[str, ...]:
    """The variants of the dial."""
    names = [dial(method, missing) for method in DIAL_METHODS for missing in DIALS]
    names += [
        dial(method, missing, "norepair") for method in DIAL_METHODS for missing in SPREAD_DIALS
    ]
    names += [dial(DRIFT_BOUND.name, missing, "norepair", "dispersed") for missing in SPREAD_DIALS]
    return tuple(names)


DIAL_METHODS = (DRIFT_BOUND.name, SHARDED.name)
DIAL_GOALS = tuple(dial(method, DEFAULT_DIAL, "norepair") for method in DIAL_METHODS)
"""What has a goal without a single packet that is sent again."""


def compared() -> tuple[str, ...]:
    """The variants that run in every network."""
    return ("zero-fill", "own-gradient", DDP.name, UNREPAIRED, *method_names(), CONTROL)


@dataclass(frozen=True)
class Run(Piece):
    """One training run. ``loss``: share of packets dropped on average over the links."""

    task: str
    world: int
    kind: str
    loss: float
    variant: str
    seed: int

    @property
    def base(self) -> Run:
        """What it is compared with: nothing lost, same ranks, same seed."""
        return Run(self.task, self.world, "none", 0.0, BASE, self.seed)

    @property
    def cell(self) -> tuple[str, int, str, float, str]:
        """The runs that differ in nothing but their seed."""
        return self.task, self.world, self.kind, self.loss, self.variant


def faults(run: Run) -> str:
    """The option ``inject`` of a run."""
    if run.variant == CONTROL:
        return ""
    links: dict[tuple[int, int], float] = {}
    loss = run.loss
    if run.kind == "uneven":
        loss, bad = uneven(run.loss, run.world)
        links = {(0, 1): bad, (1, 0): bad}
    return inject_text(loss, BURSTS.get(run.kind, 1), run.seed, links) or ""


def batch_share(run: Run) -> float:
    """The share of the batch that a run trains with: the control's is the inverse of the variance
    that loss adds, (1 - p^N) / (1 - p), so that both have the same."""
    if run.variant != CONTROL:
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
                        for variant in compared():
                            if variant != CONTROL or kind == KINDS[0]:
                                yield Run(task, world, kind, loss, variant, seed)
        for loss in GOALS:
            for variant in (*TRIED, *AGE_RULES):
                yield Run(TASKS[0], WORLDS[0], KINDS[0], loss, variant, seed)
            for kind in GOAL_KINDS:
                for variant in DISPERSED if loss == max(GOALS) else DISPERSED[:1]:
                    yield Run(TASKS[0], WORLDS[0], kind, loss, variant, seed)
        for world, kind in ((WORLDS[0], KINDS[1]), (WORLDS[1], KINDS[0]), (WORLDS[1], KINDS[1])):
            for variant in AGE_RULES:
                yield Run(TASKS[0], world, kind, max(GOALS), variant, seed)
        for kind in GOAL_KINDS:
            yield Run(TASKS[0], WORLDS[1], kind, max(GOALS), DISPERSED[1], seed)
        for world in WORLDS:
            for task in TASKS:
                # They should be the reliable run when nothing is lost; the others then are "ddp".
                for variant in (DDP.name, *method_names()):
                    yield Run(task, world, "none", 0.0, variant, seed)
        yield from _dials(seed)
        yield from _alone(seed, (SHORT_BURSTS,))
        yield from _long_streams(seed)
        for loss in WIRE_LOSSES:
            for variant in WIRES:
                yield Run(TASKS[0], WORLDS[0], KINDS[0] if loss else "none", loss, variant, seed)


def _dials(seed: int) -> Iterator[Run]:
    """All dials with 4 ranks, the default alone with 8."""
    for world in WORLDS:
        few = (*DIAL_GOALS, *(dial(method, DEFAULT_DIAL) for method in DIAL_METHODS))
        for task in DIAL_TASKS:
            if task not in TASKS:
                yield Run(task, world, "none", 0.0, BASE, seed)
            for kind in GOAL_KINDS:
                for loss in GOALS:
                    for variant in dials() if world == WORLDS[0] else few:
                        yield Run(task, world, kind, loss, variant, seed)


def _long_streams(seed: int) -> Iterator[Run]:
    """Bursts first, which take whole streams of the small GPT."""
    for kind in reversed(GOAL_KINDS):
        for world in WORLDS:
            if kind == "bursty":
                yield Run(LONG_TASK, world, "none", 0.0, BASE, seed)
            for loss in GOALS:
                for variant in DIAL_GOALS:
                    yield Run(LONG_TASK, world, kind, loss, variant, seed)


def _with_goals(seed: int) -> Iterator[Run]:
    for world in WORLDS:
        yield Run(TASKS[0], world, "none", 0.0, BASE, seed)
        for kind in GOAL_KINDS:
            for loss in GOALS:
                for variant in method_names():
                    yield Run(TASKS[0], world, kind, loss, variant, seed)
    for task in DIAL_TASKS:
        if task != TASKS[0]:
            yield from (Run(task, world, "none", 0.0, BASE, seed) for world in WORLDS)
    yield from _alone(seed, ALONE_KINDS)


def _alone(seed: int, kinds: Collection[str]) -> Iterator[Run]:
    """What has goals with nothing resent, less what other rows have of it."""
    for task in DIAL_TASKS:
        for world in WORLDS:
            for kind in kinds:
                for loss in GOALS:
                    yield from (Run(task, world, kind, loss, one, seed) for one in DIAL_GOALS)
