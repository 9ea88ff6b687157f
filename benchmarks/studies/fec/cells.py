"""What is measured, as data: losses, and variants to deal with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.common.results import Piece
from lossycoll.lab import Link, Network, Port

LOSSES = (0.001, 0.01, 0.05, 0.1)
BURSTS = (1, 4)
ELEMENTS = 1 << 20  # float32: 4 MiB
PAYLOAD = 1408
STREAM = -(-ELEMENTS // 2 // (PAYLOAD // 4))
"""Packets of one of two ranks' segments."""
WIRE = Network(
    hosts=2,
    link=Link(loss=0.01, delay_ms=40),
    port=Port(up_mbit=1000, down_mbit=1000, queue_ms=25),
)
VARIANTS: Final[dict[str, dict[str, Any]]] = {
    "nothing": {"fec": 0},
    "fec=0.05": {"fec": 0.05},
    "fec=0.1": {"fec": 0.1},
    "fec=0.2": {"fec": 0.2},
    "fec=auto": {"fec": "auto"},
    "max_missing=0.01": {"max_missing": 0.01},
    "the same, repair=0": {"max_missing": 0.01, "repair": 0},
    "repair=1": {"repair": 1},
    "fec=0.1, repair=1": {"fec": 0.1, "repair": 1},
}
"""Options of a group."""
ALL = "all"


@dataclass(frozen=True)
class Cell(Piece):
    """``part``: "residual", of one variant over loopback, or "lab", the time of ALL of them on a
    long path."""

    part: str
    variant: str
    loss: float
    burst: int


def cells() -> Iterator[Cell]:
    for burst in BURSTS:
        for loss in LOSSES:
            for variant in VARIANTS:
                yield Cell("residual", variant, loss, burst)
    yield Cell("lab", ALL, WIRE.link.loss, 1)
