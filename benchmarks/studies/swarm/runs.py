"""What is measured, as data: variants of a swarm, its faults, seeds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.common import training
from benchmarks.common.results import Piece
from lossycoll.cli.demo.worker import TrainConfig

PROFILE: Final = "home"
PEERS: Final = 8
REFERENCE: Final = "moshpit"
"""The variant with whose loss the others' is compared."""


@dataclass(frozen=True)
class Fault:
    """``peer`` is killed, or comes, when peer 0 has had this share of the steps. Peers that come
    have numbers from ``PEERS`` on, and hosts of their own."""

    share: float
    kind: str
    peer: int


KILLED, JOINED = "killed", "joined"
FAULTS: Final = (
    Fault(1 / 4, KILLED, 2),
    Fault(3 / 8, JOINED, PEERS),
    Fault(1 / 2, KILLED, 5),
    Fault(5 / 8, JOINED, PEERS + 1),
)
NEWCOMERS: Final = sum(fault.kind == JOINED for fault in FAULTS)


@dataclass(frozen=True)
class Variant:
    """``by``: who averages. ``control``: TCP's congestion control, "" where no TCP carries values.
    ``wire``: how packets carry them."""

    by: str
    faults: bool = False
    wire: str = "same"
    control: str = ""


MOSHPIT, HIVEMIND = "moshpit", "hivemind"
VARIANTS: Final = {
    REFERENCE: Variant(MOSHPIT),
    "moshpit, faults": Variant(MOSHPIT, faults=True),
    "moshpit, int8, faults": Variant(MOSHPIT, faults=True, wire="int8"),
    "hivemind, cubic": Variant(HIVEMIND, control="cubic"),
    "hivemind, bbr": Variant(HIVEMIND, control="bbr"),
    "hivemind, bbr, faults": Variant(HIVEMIND, faults=True, control="bbr"),
}


@dataclass(frozen=True)
class Budget:
    """The training of every run. ``every``: steps from round to round. ``batch``: windows of 64
    bytes per peer and step. ``limit``: seconds, after which a run has failed."""

    steps: int = 400
    every: int = 10
    width: int = 128
    batch: int = 8
    limit: float = 900.0

    def __post_init__(self) -> None:
        training.check(self, ("steps", "every", "width", "batch"))
        if self.steps % self.every:
            raise ValueError(f"steps is {self.steps}, wanted a multiple of every, {self.every}")


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
    def faults(self) -> tuple[Fault, ...]:
        return FAULTS if VARIANTS[self.variant].faults else ()

    def train(self) -> TrainConfig:
        """What the demo's parts are told; those of its backends are not used."""
        return training.config(self.budget, self.seed)


def runs(seeds: Sequence[int], variants: Sequence[str], budget: Budget) -> Iterator[Run]:
    """A whole comparison for the first seed, then for the next."""
    for seed in seeds:
        for variant in variants:
            yield Run(variant, seed, budget)
