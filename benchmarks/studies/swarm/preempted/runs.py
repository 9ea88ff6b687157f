"""What is measured, as data: who averages, how fast peers are, who is preempted when, seeds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.common import training
from benchmarks.common.results import Piece
from lossycoll.cli.demo.worker import TrainConfig

PROFILE: Final = "home"
SPEEDS: Final = (4, 2, 1, 4, 2, 1)
"""Of each peer, in steps of the slowest's."""
PEERS: Final = len(SPEEDS)
WATCHED: Final = 0
"""The peer whose model is judged: it is never preempted itself."""
REST_SECONDS: Final = 4.0
"""A peer that has come back isn't preempted for so long."""


@dataclass(frozen=True)
class Variant:
    """``by``: the module that averages. ``control``: TCP's congestion control, "" where no TCP
    carries values. ``wire``: how packets carry them. ``together``: a preempted peer ends all, as
    the ranks of one job. ``factor``: its rounds are so much longer than the budget's."""

    by: str
    control: str = ""
    wire: str = "same"
    together: bool = False
    factor: float = 1.0


HIVEMIND: Final = "hivemind"
VARIANTS: Final = {
    "lossycoll": Variant("lossycoll"),
    "lossycoll, int8": Variant("lossycoll", wire="int8"),
    # What is lost with a rank is the work since the latest round.
    "gloo, restarts": Variant("gloo", control="bbr", together=True, factor=0.5),
    "gossip": Variant("gossip", control="bbr"),
    "hivemind": Variant(HIVEMIND, control="bbr"),
    # No step is taken beside its rounds.
    "hivemind, long rounds": Variant(HIVEMIND, control="bbr", factor=2.0),
}


@dataclass(frozen=True)
class Preemption:
    """``peer`` is killed ``at`` seconds of training, and started again after ``pause`` seconds."""

    at: float
    peer: int
    pause: float


@dataclass(frozen=True)
class Budget:
    """The training of every run. ``seconds``: how long it lasts. ``step``: seconds of a step of the
    slowest peer. ``local``: its steps from round to round. ``gap`` and ``pause``: mean seconds
    between two preemptions, and until a preempted peer is back."""

    seconds: float = 120.0
    step: float = 0.8
    local: int = 8
    gap: float = 16.0
    pause: float = 10.0
    width: int = 128
    batch: int = 4

    def __post_init__(self) -> None:
        for name in ("seconds", "step", "gap", "pause"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted seconds above 0")
        training.check(self, ("local", "width", "batch"))

    @property
    def steps(self) -> int:
        """Of the slowest peer, were it never preempted."""
        return int(self.seconds / self.step)

    @property
    def limit(self) -> float:
        """Seconds of training."""
        return self.seconds

    @property
    def target(self) -> int:
        """Windows of all peers from round to round."""
        return self.local * self.batch * sum(SPEEDS)


@dataclass(frozen=True)
class Run(Piece):
    """One training. Raises ValueError for a variant that isn't known."""

    variant: str
    seed: int
    budget: Budget

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant is {self.variant!r}, wanted one of {', '.join(VARIANTS)}")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Run:
        return cls(**{**settings, "budget": Budget(**settings["budget"])})

    @property
    def preemptions(self) -> list[Preemption]:
        """The same for all variants."""
        return schedule(self.seed, self.budget)

    def train(self) -> TrainConfig:
        """What the demo's parts are told."""
        return training.config(self.budget, self.seed)


def schedule(seed: int, budget: Budget) -> list[Preemption]:
    """Who is preempted when: gaps and pauses are uniform, from half to one and a half of their
    mean. Nobody is preempted who isn't there."""
    draw = random.Random(seed)
    back = dict.fromkeys((peer for peer in range(PEERS) if peer != WATCHED), 0.0)
    found = []
    at = budget.gap
    while at < budget.seconds:
        there = [peer for peer, since in back.items() if since <= at]
        pause = budget.pause * draw.uniform(0.5, 1.5)
        if there:
            peer = draw.choice(there)
            found.append(Preemption(round(at, 3), peer, round(pause, 3)))
            back[peer] = at + pause + REST_SECONDS
        at += budget.gap * draw.uniform(0.5, 1.5)
    return found


def runs(seeds: Sequence[int], variants: Sequence[str], budget: Budget) -> Iterator[Run]:
    """A whole comparison for the first seed, then for the next."""
    for seed in seeds:
        for variant in variants:
            yield Run(variant, seed, budget)
