"""What is measured, as data: ways to send, local steps from round to round, seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.common import training
from benchmarks.common.results import Piece
from lossycoll.cli.demo.worker import TrainConfig

PEERS: Final = 8
REFERENCE: Final = "DiLoCo"
"""The variant with whose bytes and loss the others' are compared, at ``GOAL_EVERY`` steps."""
GOAL_EVERY: Final = 30
EVERY: Final = (10, 30, 100)


@dataclass(frozen=True)
class Variant:
    """``wire``: how packets carry values. ``average`` and ``fragments``: of MoshpitSGD."""

    wire: str = "same"
    average: str = "parameters"
    fragments: int = 1


PSEUDO: Final = "pseudo-gradients"
VARIANTS: Final = {
    REFERENCE: Variant(),
    "2 bits, 5 fragments": Variant("int2", PSEUDO, 5),
    "2 bits": Variant("int2", PSEUDO),
    "4 bits": Variant("int4", PSEUDO),
    "4 bits, 8 fragments": Variant("int4", PSEUDO, 8),
    "5 fragments": Variant("same", PSEUDO, 5),
}


@dataclass(frozen=True)
class Budget:
    """The training of every run. ``batch``: windows of 64 bytes per peer and step. ``limit``:
    seconds, after which a run has failed."""

    steps: int = 600
    width: int = 128
    batch: int = 1
    limit: float = 3600.0

    def __post_init__(self) -> None:
        training.check(self, ("steps", "width", "batch"))


@dataclass(frozen=True)
class Run(Piece):
    """One training. Raises ValueError for a variant that isn't known, or a number of steps from
    round to round of which the training isn't a multiple."""

    variant: str
    every: int
    seed: int
    budget: Budget

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant is {self.variant!r}, wanted one of {', '.join(VARIANTS)}")
        if self.every < 1 or self.budget.steps % self.every:
            raise ValueError(
                f"every is {self.every}, wanted a divisor of the {self.budget.steps} steps"
            )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Run:
        return cls(**{**settings, "budget": Budget(**settings["budget"])})

    def train(self) -> TrainConfig:
        """What the demo's parts are told."""
        return training.config(self.budget, self.seed)


def runs(
    seeds: Sequence[int], variants: Sequence[str], everies: Sequence[int], budget: Budget
) -> Iterator[Run]:
    """The goal's comparison for all seeds first, then the others for the first seed."""
    goal = [name for name in variants if name in list(VARIANTS)[:2]]
    if GOAL_EVERY in everies:
        for seed in seeds:
            for name in goal:
                yield Run(name, GOAL_EVERY, seed, budget)
    for seed in seeds[:1]:
        for every in everies:
            for name in variants:
                if every != GOAL_EVERY or name not in goal:
                    yield Run(name, every, seed, budget)
