"""What parity leaves missing: by engines, and of the losses that injection draws, set by set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lossycoll.plan import copies
from lossycoll.plan.faults import Inject
from lossycoll.plan.sets import Code
from tests.oracle.masks import lost
from tests.oracle.parity import Shape, fitted, shape_of
from tests.oracle.recovery import left
from tests.support.network import Network

CODES = {0.05: Code(64, 6), 0.2: Code(64, 25), 0.4: Code(64, 64)}
"""By loss: about what leaves 1% of a long stream."""
PACKETS = (24, 96, 192, 2979)
BURSTS = (1.0, 8.0)
DRAWN, SENT = 4_000_000, 400_000
"""Packets of each case: whose losses are drawn alone, and that engines send."""
PAYLOAD = 64
AT_ONCE = 20


@dataclass(frozen=True)
class Left:
    """Shares of the data packets that stay missing."""

    measured: float  # the mean over streams
    error: float  # its standard error
    predicted: float  # by the chain, of sets by their sizes


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
    error = float(np.std(shares) / np.sqrt(len(shares)))
    return Left(float(np.mean(shares)), error, predicted(shape, n, loss, burst))


def predicted(shape: Shape, n: int, loss: float, burst: float) -> float:
    """The share of a stream of ``n`` packets by the chain: of its sets, weighted by their sizes."""
    columns, rows = np.bincount(shape.of_data), np.bincount(shape.of_parity)
    total = 0.0
    for first in range(0, n, shape.window):
        sets = np.unique(shape.of_data[first : first + shape.window])
        for one in sets:
            data, parity = int(columns[one]), int(rows[one])
            total += data * left(loss, burst, data, parity, len(sets))
    return total / n


def left_by_engines(
    n: int, code: Code, loss: float, burst: float, sent: int = SENT, seed: int = 5
) -> float:
    """The share that stays missing where two engines send each other streams of ``n`` packets."""
    faults = f"loss={loss},burst={burst},seed={seed}"
    plans = [copies.all_gather(2, rank, n * PAYLOAD, PAYLOAD) for rank in range(2)]
    given = np.ones(n * PAYLOAD, np.uint8)
    missing, streams = 0, 0
    with Network(2, PAYLOAD, inject=faults, reorder_min=2e-4) as network:
        while streams * n < sent:
            got = [[np.zeros(2 * given.size, np.uint8) for _ in range(2)] for _ in range(AT_ONCE)]
            tickets = [
                network.submit(rank, plans[rank], (given, one[rank]), "bytes", code=code)
                for one in got
                for rank in range(2)
            ]
            for number, ticket in enumerate(tickets):
                assert network.end(number % 2, ticket).code == 0
            for one in got:
                for rank in range(2):
                    came = one[rank].reshape(2, n, PAYLOAD)[1 - rank, :, 0]
                    missing += int((came == 0).sum())
                    streams += 1
        assert sum(engine.stats().parity_sent for engine in network.engines) > 0
    return missing / (streams * n)


def parity() -> list[dict[str, Any]]:
    """A row for each loss and burst; its cells by the number of packets."""
    rows = []
    for loss, code in CODES.items():
        for burst in BURSTS:
            cells = {}
            for n in PACKETS:
                found = left_missing(n, fitted(code, n), loss, burst)
                cells[str(n)] = {
                    "parity": len(shape_of(fitted(code, n), n).of_parity) / n,
                    "measured": found.measured,
                    "engines": left_by_engines(n, code, loss, burst),
                    "error": found.error,
                    "predicted": found.predicted,
                }
            rows.append({"loss": loss, "burst": burst, "by_packets": cells})
    return rows
