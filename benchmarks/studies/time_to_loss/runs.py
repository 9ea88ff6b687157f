"""What is measured, as data: networks, ways to train, seeds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lossycoll.cli.demo.model import HEAD_WIDTH
from lossycoll.cli.demo.worker import TrainConfig

PROFILES = ("cross-dc", "home")
CONTEXT = 64
LAYERS = 2


@dataclass(frozen=True)
class Way:
    """``method`` is the demo's. ``control``: TCP's congestion control, of gloo's connections."""

    backend: str
    method: str
    environment: Mapping[str, str]
    control: str = ""


WAYS = {
    "lossy": Way("lossy", "ddp", {}),
    "lossy, DriftBound": Way("lossy", "bounded", {"LOSSYCOLL_REPAIR": "2"}),
    "lossy, ShardedOptimizer": Way("lossy", "sharded", {}),
    "gloo, cubic": Way("gloo", "ddp", {}, "cubic"),
    "gloo, bbr": Way("gloo", "ddp", {}, "bbr"),
}
REFERENCES = tuple(name for name, way in WAYS.items() if way.backend == "gloo")


@dataclass(frozen=True)
class Budget:
    """The training of every run. ``batch``: windows of 64 bytes per rank and step. ``limit``:
    seconds of training after which a run ends, whatever it has reached."""

    steps: int = 200
    width: int = 64
    batch: int = 4
    limit: float = 900.0

    def __post_init__(self) -> None:
        for name in ("steps", "width", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, wanted at least 1")
        if self.width % HEAD_WIDTH:
            raise ValueError(f"width is {self.width}, wanted a multiple of {HEAD_WIDTH}")
        if not 0 < self.limit < math.inf:
            raise ValueError(f"limit is {self.limit:g}, wanted seconds above 0")


@dataclass(frozen=True)
class Run:
    """One training. Raises ValueError for a network or a way that isn't known."""

    profile: str
    way: str
    seed: int
    budget: Budget

    def __post_init__(self) -> None:
        for what, value, known in (("profile", self.profile, PROFILES), ("way", self.way, WAYS)):
            if value not in known:
                raise ValueError(f"{what} is {value!r}, wanted one of {', '.join(known)}")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Run:
        """The inverse of :meth:`as_dict`."""
        return cls(**{**values, "budget": Budget(**values["budget"])})

    def config(self) -> TrainConfig:
        way = WAYS[self.way]
        return TrainConfig(
            backend=way.backend,
            method=way.method,
            loss=0.0,
            steps=self.budget.steps,
            seed=self.seed,
            layers=LAYERS,
            width=self.budget.width,
            context=CONTEXT,
            batch=self.budget.batch,
            events="",
        )


def runs(
    seeds: Sequence[int], profiles: Sequence[str], ways: Sequence[str], budget: Budget
) -> Iterator[Run]:
    """A whole comparison for the first seed, then for the next."""
    for seed in seeds:
        for profile in profiles:
            for way in ways:
                yield Run(profile, way, seed, budget)
