"""What is measured, as data: losses, and variants to deal with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from benchmarks.common.results import Piece
from lossycoll.lab import Link, Network, Port
from lossycoll.options.fields import Options
from lossycoll.plan.sets import Code
from tests.oracle import recovery
from tests.oracle.parity import fitted, shape_of

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


def left(loss: float, burst: float, code: Code) -> float:
    """What a code leaves of a stream of the study."""
    fits = fitted(code, STREAM)
    shape = shape_of(fits, STREAM)
    columns = int(np.bincount(shape.of_data)[0])
    sets = int(shape.of_data[: shape.window].max()) + 1
    return recovery.left(loss, burst, columns, fits.rows, sets)


def predicted(variant: str, loss: float, burst: float) -> float | None:
    """What a loss leaves with a variant; None where no formula is given."""
    options = Options(**VARIANTS[variant])
    code, most_parity, _ = options.recovery
    if most_parity or (code.rows and options.repair):
        return None
    return left(loss, burst, code) if code.rows else loss ** (1 + options.repair)
