"""The demo's model as studies train it: what a run's budget may be, and what its ranks are told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

from lossycoll.cli.demo.model import HEAD_WIDTH
from lossycoll.cli.demo.worker import TrainConfig

CONTEXT: Final = 64
LAYERS: Final = 2


class Budget(Protocol):
    """``batch``: windows of ``CONTEXT`` bytes per rank and step. ``limit``: seconds."""

    @property
    def steps(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def limit(self) -> float: ...


def check(budget: Budget, counts: Sequence[str]) -> None:
    """Raises ValueError for a budget that can't be; ``counts`` names its whole numbers from 1."""
    for name in counts:
        if getattr(budget, name) < 1:
            raise ValueError(f"{name} is {getattr(budget, name)}, wanted at least 1")
    if budget.width % HEAD_WIDTH:
        raise ValueError(f"width is {budget.width}, wanted a multiple of {HEAD_WIDTH}")
    if not 0 < budget.limit < math.inf:
        raise ValueError(f"limit is {budget.limit:g}, wanted seconds above 0")


def check_seeds(seeds: Sequence[int]) -> None:
    """Raises ValueError for seeds of which one is twice, or below 0."""
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ValueError(f"seeds are {seeds}, wanted different numbers from 0")


def config(
    budget: Budget, seed: int, backend: str = "", method: str = "", module: str = ""
) -> TrainConfig:
    """What a rank is told, without injected loss; no backend and method where it has its own."""
    return TrainConfig(
        backend=backend,
        method=method,
        module=module,
        loss=0.0,
        steps=budget.steps,
        seed=seed,
        layers=LAYERS,
        width=budget.width,
        context=CONTEXT,
        batch=budget.batch,
        events="",
    )
