"""What is measured, as data: pieces of a minute or two each, so that a run can be cut short."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lossycoll.lab.network import Link, Network, Port

from .tasks import TASKS
from .ways import RULE_WAYS, STEP_WAYS, TRAIN_WAYS

HOSTS = 4
DELAY_MS = 1.0
QUEUE_MS = 25.0
TRAIN_MBIT = 20.0
"""Of small models' links: their gradients are to links of 20 Mbit/s what those of models five times
as large are to 100 Mbit/s."""
LOSSES = (0.0, 0.1)
AT_ONCE = 3


@dataclass(frozen=True)
class Cell:
    """``kind``: "speed" (of the compressor alone), "forms", "steps" or "train"."""

    kind: str
    ways: tuple[str, ...] = ()
    mbit: float = 0.0
    loss: float = 0.0
    task: str = ""
    seed: int = 1

    @property
    def network(self) -> Network:
        return Network(
            hosts=HOSTS,
            link=Link(loss=self.loss, delay_ms=DELAY_MS),
            port=Port(up_mbit=self.mbit, down_mbit=self.mbit, queue_ms=QUEUE_MS),
        )

    @property
    def name(self) -> str:
        path = f", {self.mbit:g} Mbit/s" if self.mbit else ""
        lost = f", {self.loss:.0%} lost" if self.kind == "train" else ""
        ways = f": {'; '.join(self.ways)}" if self.kind == "train" else ""
        return f"{self.kind} {self.task}{path}{lost}{ways}".replace(" ,", ",")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ways": list(self.ways)}

    @classmethod
    def of(cls, values: dict[str, Any]) -> Cell:
        return cls(**{**values, "ways": tuple(values["ways"])})


def cells() -> Iterator[Cell]:
    """The most important first."""
    yield Cell("speed")
    yield Cell("forms")
    for mbit in (100.0, 1000.0):
        yield Cell("steps", STEP_WAYS, mbit)
    for task in TASKS:
        for loss in LOSSES:
            for i in range(0, len(TRAIN_WAYS), AT_ONCE):
                yield Cell("train", TRAIN_WAYS[i : i + AT_ONCE], TRAIN_MBIT, loss, task)
    for i in range(0, len(RULE_WAYS), AT_ONCE):
        yield Cell("train", RULE_WAYS[i : i + AT_ONCE], TRAIN_MBIT, 0.1, "gpt")
