"""What is measured, as data: pieces of a minute or two each, so that a run can be cut short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from benchmarks.common.results import Piece
from lossycoll.cli.argtypes import inject_text
from lossycoll.lab.network import Link, Network, Port

from . import speedup
from .long import variants as long
from .tasks import TASKS
from .variants import NONE_VARIANTS, RULE_VARIANTS, STEP_VARIANTS, TRAIN_VARIANTS

HOSTS = 4
DELAY_MS = 1.0
QUEUE_MS = 25.0
TRAIN_MBIT = 100.0
LOSSES = (0.0, 0.1)
SEED_OF_LOSS = 7
LONG = "long"
LONG_JOB = 4


@dataclass(frozen=True)
class Cell(Piece):
    """``kind``: "speed" (of the compressor alone), "forms", "contraction", "speedup", "steps",
    "train" or "long".

    A long training is one of ``variants``; ``seed`` counts there and in a speed-up, and no network
    is in between.

    ``loss``: share of packets that the backend itself drops (LOSSYCOLL_INJECT), the same ones for
    every variant; gloo's TCP has none of it.
    """

    kind: str
    variants: tuple[str, ...] = ()
    mbit: float = 0.0
    loss: float = 0.0
    task: str = ""
    seed: int = 1

    @property
    def network(self) -> Network:
        return Network(
            hosts=HOSTS,
            link=Link(delay_ms=DELAY_MS),
            port=Port(up_mbit=self.mbit, down_mbit=self.mbit, queue_ms=QUEUE_MS),
        )

    @property
    def environment(self) -> dict[str, str]:
        text = inject_text(self.loss, 1, SEED_OF_LOSS)
        return {"LOSSYCOLL_INJECT": text} if text else {}

    @property
    def name(self) -> str:
        path = f", {self.mbit:g} Mbit/s" if self.mbit else ""
        lost = f", {self.loss:.0%} lost" if self.kind == "train" else ""
        variants = f": {'; '.join(self.variants)}" if self.variants and self.task else ""
        return f"{self.kind} {self.task}{path}{lost}{variants}".replace(" ,", ",")

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Cell:
        return cls(**{**settings, "variants": tuple(settings["variants"])})


def cells() -> Iterator[Cell]:
    """The most important first."""
    yield Cell("speed")
    yield Cell("forms")
    yield Cell("contraction")
    for seed in speedup.SEEDS:
        yield Cell("speedup", seed=seed)
        yield Cell("speedup", task=speedup.NETWORK, seed=seed)
    for mbit in (100.0, 1000.0):
        yield Cell("steps", STEP_VARIANTS, mbit)
    for task in TASKS:
        for loss in LOSSES:
            yield Cell("train", TRAIN_VARIANTS[bool(loss) :], TRAIN_MBIT, loss, task)
            yield Cell("train", NONE_VARIANTS, TRAIN_MBIT, loss, task)
    yield Cell("train", RULE_VARIANTS, TRAIN_MBIT, 0.1, "gpt")
    for seed, task, variant in long.planned():
        yield Cell(LONG, (variant,), task=task, seed=seed)


def batches(planned: Sequence[Cell]) -> Iterator[list[Cell]]:
    """One by one, but long trainings of a task and a seed in jobs of a few: a job's ranks take
    seconds to start, and what a job has measured is kept when it ends."""
    for (kind, _, _), found in groupby(planned, lambda cell: (cell.kind, cell.task, cell.seed)):
        cells = list(found)
        size = LONG_JOB if kind == LONG else 1
        yield from (cells[i : i + size] for i in range(0, len(cells), size))
