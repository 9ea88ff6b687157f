"""What is measured, as data: networks, variants of training, seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import training
from benchmarks.common.results import Piece
from lossycoll.cli.demo.methods import DDP, DRIFT_BOUND, SHARDED, Method
from lossycoll.cli.demo.worker import TrainConfig

PROFILES = ("cross-dc", "home", "transatlantic", "two-sites")
SLOW = ("home",)
"""Where bytes are most of a step: there they also travel in few bits."""
FEW_BITS = {"LOSSYCOLL_WIRE": "int4", "LOSSYCOLL_WIRE_ROUNDING": "stochastic"}


@dataclass(frozen=True)
class Variant:
    """``control``: TCP's congestion control, of gloo's connections. ``profiles``: where it runs."""

    backend: str
    method: Method
    environment: Mapping[str, str]
    control: str = ""
    profiles: Sequence[str] = PROFILES


VARIANTS = {
    "lossy": Variant("lossy", DDP, {}),
    "lossy, DriftBound": Variant("lossy", DRIFT_BOUND, {}),
    "lossy, ShardedOptimizer": Variant("lossy", SHARDED, {}),
    "lossy, int8": Variant("lossy", DDP, {"LOSSYCOLL_WIRE": "int8"}, profiles=SLOW),
    "lossy, int4": Variant("lossy", DDP, FEW_BITS, profiles=SLOW),
    "lossy, DriftBound, int8": Variant(
        "lossy", DRIFT_BOUND, {"LOSSYCOLL_WIRE": "int8"}, profiles=SLOW
    ),
    "gloo, cubic": Variant("gloo", DDP, {}, "cubic"),
    "gloo, bbr": Variant("gloo", DDP, {}, "bbr"),
}
REFERENCES = tuple(name for name, variant in VARIANTS.items() if variant.backend == "gloo")


@dataclass(frozen=True)
class Budget:
    """The training of every run. ``batch``: windows of 64 bytes per rank and step. ``limit``:
    seconds of training after which a run ends, whatever it has reached."""

    steps: int = 200
    width: int = 64
    batch: int = 4
    limit: float = 900.0

    def __post_init__(self) -> None:
        training.check(self, ("steps", "width", "batch"))


@dataclass(frozen=True)
class Run(Piece):
    """One training. Raises ValueError for a network or a variant that isn't known."""

    profile: str
    variant: str
    seed: int
    budget: Budget

    def __post_init__(self) -> None:
        for what, known in (("profile", PROFILES), ("variant", tuple(VARIANTS))):
            value = getattr(self, what)
            if value not in known:
                raise ValueError(f"{what} is {value!r}, wanted one of {', '.join(known)}")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Run:
        return cls(**{**settings, "budget": Budget(**settings["budget"])})

    def config(self) -> TrainConfig:
        variant = VARIANTS[self.variant]
        return training.config(
            self.budget, self.seed, variant.backend, variant.method.name, variant.method.module
        )


def runs(
    seeds: Sequence[int], profiles: Sequence[str], variants: Sequence[str], budget: Budget
) -> Iterator[Run]:
    """A whole comparison for the first seed, then for the next."""
    for seed in seeds:
        for profile in profiles:
            for variant in variants:
                if profile in VARIANTS[variant].profiles:
                    yield Run(profile, variant, seed, budget)
