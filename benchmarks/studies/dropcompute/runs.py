"""What is measured, as data: delays, variants of training, sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.results import Piece
from lossycoll.cli.demo.model import HEAD_WIDTH

RANKS = 4
MICRO_BATCHES = 12
CONTEXT = 64
LAYERS = 2


@dataclass(frozen=True)
class Variant:
    """How a rank trains. ``cut``: what becomes of a micro-batch that the threshold falls into:
    "started", it is seen through; "threshold", its delay is given up."""

    dropping: bool
    divisor: str = "completed"
    cut: str = "started"


VARIANTS: Mapping[str, Variant] = {
    "no threshold": Variant(dropping=False),
    "DropCompute": Variant(dropping=True),
    "fixed divisor": Variant(dropping=True, divisor="fixed"),
    "given up when late": Variant(dropping=True, cut="threshold"),
}
PLANNED: Mapping[float, Sequence[str]] = {
    1.0: tuple(VARIANTS),
    4.0: ("no threshold", "DropCompute", "given up when late"),
}
"""Variants by the factor of the paper's delay."""


@dataclass(frozen=True)
class Budget:
    """The training of every run. ``mean``: seconds of a micro-batch, on average. ``batch``: windows
    of 64 bytes in a micro-batch. ``warm_up`` steps after the first ``skip`` are measured, and
    nothing is dropped in them."""

    steps: int = 150
    skip: int = 5
    warm_up: int = 30
    mean: float = 0.03
    width: int = 64
    batch: int = 2
    seed: int = 1

    def __post_init__(self) -> None:
        if self.width < 1 or self.width % HEAD_WIDTH:
            raise ValueError(f"width is {self.width}, wanted a multiple of {HEAD_WIDTH}")
        if self.batch < 1 or self.skip < 0 or self.warm_up < 2:
            raise ValueError(
                f"batch, skip and warm_up are {self.batch}, {self.skip} and {self.warm_up}, wanted "
                f"at least 1, 0 and 2"
            )
        if self.steps <= self.skip + self.warm_up:
            raise ValueError(
                f"steps is {self.steps}, wanted more than the {self.skip + self.warm_up} in which "
                f"nothing is dropped"
            )
        if not 0 < self.mean < math.inf:
            raise ValueError(f"mean is {self.mean:g}, wanted seconds above 0")

    @property
    def measured_from(self) -> int:
        """The first step in which something may be dropped."""
        return self.skip + self.warm_up


@dataclass(frozen=True)
class Run(Piece):
    """One training. Raises ValueError for a variant that isn't known."""

    variant: str
    factor: float
    budget: Budget

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant is {self.variant!r}, wanted one of {', '.join(VARIANTS)}")
        if not 0 <= self.factor < math.inf:
            raise ValueError(f"factor is {self.factor:g}, wanted a number of at least 0")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Run:
        return cls(**{**settings, "budget": Budget(**settings["budget"])})

    @property
    def clean(self) -> float:
        """Seconds of a micro-batch without its delay."""
        return self.budget.mean / (1 + 0.5 * self.factor)


def planned(budget: Budget) -> list[Run]:
    return [Run(name, factor, budget) for factor, names in PLANNED.items() for name in names]
