"""What smaller packets leave of a short stream in bursts, and what they cost.

By the exact chain, and of the losses that injection draws. Parity is what the engine would choose
for a share of 1% missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from lossycoll.plan.faults import Inject
from lossycoll.plan.sets import NO_PARITY
from tests.oracle.masks import lost
from tests.oracle.parity import shape_of

from .owners import chosen, parity_of

PAYLOAD: Final = 1408
HEADERS: Final = 48 + 28
"""Bytes of a packet besides its payload: ours, and those of UDP and IPv4."""
LENGTHS: Final = (24, 48, 193)
SIZES: Final = (1, 2, 3)
"""Times as small packets are."""
LOSSES: Final = (0.1, 0.2, 0.4)
BURSTS: Final = (1.0, 5.0, 8.0)
WORLD: Final = 8
DRAWN: Final = 4000
"""Streams whose losses are drawn, of each cell."""


def left_at(places: Sequence[int], data: int, rows: int, loss: float, burst: float) -> float:
    """The share of a set's data that stays missing, exactly.

    ``places``: where its packets are in the stream, ascending: ``data`` packets of data, then
    ``rows`` of parity. Between packets g apart the correlation of a Gilbert chain is c^g, c being
    1 - 1 / (burst (1 - loss)). Data are missing if more than ``rows`` packets are lost.
    """
    correlation = max(0.0, 1 - 1 / (burst * (1 - loss)))
    # Chances by (lost now, lost so far), and the same times the data lost so far.
    chance, gone = np.zeros((2, len(places) + 1)), np.zeros((2, len(places) + 1))
    chance[0, 0], chance[1, 0] = 1 - loss, loss  # of a packet before the first
    at = places[0]
    for number, place in enumerate(places):
        kept = correlation ** (place - at) if number else 0.0
        at = place
        to_lost = np.array([[loss * (1 - kept)], [loss + (1 - loss) * kept]])
        arrives = [(x * (1 - to_lost)).sum(0) for x in (chance, gone)]
        lost_now = [(x * to_lost).sum(0) for x in (chance, gone)]
        for also in lost_now:
            also[1:], also[0] = also[:-1].copy(), 0
        if number < data:
            lost_now[1] += lost_now[0]
        chance = np.stack([arrives[0], lost_now[0]])
        gone = np.stack([arrives[1], lost_now[1]])
    return float(gone[:, rows + 1 :].sum() / data)


def left_of(packets: int, loss: float, burst: float) -> float:
    """The share of a stream's data that stays missing, over all its sets, each at its places."""
    code = chosen(packets, loss, burst).code
    if code == NO_PARITY:
        return loss
    shape, total = shape_of(code, packets), 0.0
    for one in range(int(shape.of_data.max()) + 1):
        data = np.flatnonzero(shape.of_data == one).tolist()
        parity = (packets + np.flatnonzero(shape.of_parity == one)).tolist()
        total += len(data) * left_at(data + parity, len(data), len(parity), loss, burst)
    return total / packets


def drawn_of(packets: int, loss: float, burst: float, streams: int) -> tuple[float, float]:
    """The same of injection's draws: the mean over streams, and its standard error."""
    code = chosen(packets, loss, burst).code
    shape, void = shape_of(code, packets), np.zeros(packets, bool)
    faults, shares = Inject(loss=loss, burst=burst, seed=11), []
    for op in range(streams):
        gone = lost(faults, 0, op, 0, 1, 0, packets + len(shape.of_parity))
        back = shape.recover(gone[:packets], void, ~gone[packets:])
        shares.append((gone[:packets] & ~back).mean())
    return float(np.mean(shares)), float(np.std(shares) / np.sqrt(streams))


def cell(packets: int, finer: int, loss: float, burst: float, streams: int) -> dict[str, float]:
    """Of a stream of so many packets, cut ``finer`` times as small."""
    n, payload = packets * finer, PAYLOAD / finer
    measured, error = drawn_of(n, loss, burst, streams)
    parity = parity_of(chosen(n, loss, burst), n)
    each = (payload + HEADERS) / payload / ((PAYLOAD + HEADERS) / PAYLOAD)
    return {
        "bytes": (1 + parity) * each,
        "left": left_of(n, loss, burst),
        "drawn": measured,
        "error": error,
        "in_time": left_of(n, loss, burst * finer),
    }


def whole_sums(loss: float, world: int) -> float:
    """The chance that a sum has all contributions: what a set of sums could use of a packet."""
    return float((1 - loss) ** (world - 1))


def smaller(streams: int = DRAWN) -> dict[str, Any]:
    """By length, size, loss and burst."""
    return {
        "whole_sums": {str(loss): whole_sums(loss, WORLD) for loss in LOSSES},
        "rows": [
            {
                **{"loss": loss, "burst": burst, "packets": packets},
                "by_size": {
                    str(finer): cell(packets, finer, loss, burst, streams) for finer in SIZES
                },
            }
            for loss in LOSSES
            for burst in BURSTS
            for packets in LENGTHS
        ],
    }
