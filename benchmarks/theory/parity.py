"""What parity leaves missing: the losses that injection draws, decoded set by set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lossycoll.plan.faults import Inject, lost
from lossycoll.plan.sets import Code, shape_of
from lossycoll.simulate.recovery import left

CODES = {0.05: Code(64, 6), 0.2: Code(64, 25), 0.4: Code(64, 64)}
"""By loss: about what leaves 1% of a long stream."""
PACKETS = (24, 96, 192, 2979)
BURSTS = (1.0, 8.0)
DRAWN = 4_000_000
"""Packets of each case."""


@dataclass(frozen=True)
class Left:
    """Shares of the data packets that stay missing.

    Attributes:
        measured: The mean over streams.
        error: Its standard error.
        predicted: By the chain.
    """

    measured: float
    error: float
    predicted: float


def left_missing(
    n: int, code: Code, loss: float, burst: float, drawn: int = DRAWN, seed: int = 5
) -> Left:
    """Draws the losses of streams of ``n`` packets and their parity, ``drawn`` packets in all."""
    shape = shape_of(code, n)
    parity, void, shares = len(shape.of_parity), np.zeros(n, bool), []
    faults = Inject(loss=loss, burst=burst, seed=seed)
    for op in range(max(2, drawn // n)):
        gone = lost(faults, 0, op, 0, 1, 0, n + parity)
        back = shape.recover(gone[:n], void, ~gone[n:])
        shares.append(float((gone[:n] & ~back).mean()))
    columns = int(np.bincount(shape.of_data)[0])
    sets = int(shape.of_data[: shape.window].max()) + 1
    error = float(np.std(shares) / np.sqrt(len(shares)))
    return Left(float(np.mean(shares)), error, left(loss, burst, columns, code.rows, sets))


def parity() -> list[dict[str, Any]]:
    """A row for each loss and burst; its cells by the number of packets."""
    rows = []
    for loss, code in CODES.items():
        for burst in BURSTS:
            cells = {}
            for n in PACKETS:
                found = left_missing(n, code.fitted(n), loss, burst)
                cells[str(n)] = {
                    "parity": len(shape_of(code.fitted(n), n).of_parity) / n,
                    "measured": found.measured,
                    "error": found.error,
                    "predicted": found.predicted,
                }
            rows.append({"loss": loss, "burst": burst, "by_packets": cells})
    return rows
