"""What a burst leaves of a parity set, by what the set is spread over. Pure arithmetic.

A burst is a run of lost packets of one path (Gilbert). All parity is what the engine would choose
for a share of 1% missing if nothing is resent.
"""

from __future__ import annotations

from typing import Any, Final

from lossycoll.plan.order import LONGER_MOST, STREAM_PACKETS
from tests.oracle.recovery import left

from .owners import MAX_MISSING, chosen, parity_of

LOSSES: Final = (0.1, 0.2, 0.4)
BURSTS: Final = (1.0, 5.0, 8.0)
LENGTHS: Final = (6, 24, 48, 192)
"""Packets of a stream where all ranks are owners."""
BETWEEN: Final = 7
"""A rank of 8 sends to 7 in turns: so far apart are two packets of a stream at its port."""
BUCKETS: Final = 4
"""Buckets of a step, whose packets to one receiver would be one set's."""


def between(loss: float, burst: float, streams: int) -> float:
    """The mean run of lost packets among every ``streams``-th packet of a Gilbert chain.

    Neighbours of the chain are correlated by c = 1 - 1 / (burst (1 - loss)), its every s-th by c^s;
    and a chain of correlation d has runs of 1 / ((1 - loss) (1 - d)).
    """
    correlation = max(0.0, 1 - 1 / (burst * (1 - loss)))
    return float(1 / ((1 - loss) * (1 - correlation**streams)))


def needed(loss: float, burst: float, most: int = 4096) -> int:
    """The least length from which on streams get down to 1% by parity alone, by steps of a tenth;
    0: none up to ``most``."""
    packets, found = 6, 0
    while packets <= most:
        if chosen(packets, loss, burst).expected > MAX_MISSING * 1.0001:
            found = 0
        elif not found:
            found = packets
        packets = max(packets + 1, packets * 11 // 10)
    return found


def ways(packets: int, loss: float, burst: float) -> dict[str, dict[str, float]]:
    """By what a stream's sets are spread over: parity, and the share of the data left missing."""
    spread = {
        "stream": (packets, burst),
        "port": (packets, between(loss, burst, BETWEEN)),
        "buckets": (packets * BUCKETS, burst),
        "owners": (min(packets * LONGER_MOST, max(packets, STREAM_PACKETS)), burst),
    }
    found = {}
    for name, (n, run) in spread.items():
        means = chosen(n, loss, run)
        found[name] = {"parity": parity_of(means, n), "left": means.expected}
    means = chosen(packets, loss, burst)
    columns = min(packets, means.code.size) if means.code.rows else 0
    in_order = left(loss, burst, columns, means.code.rows) if columns else loss
    return {"in order": {"parity": found["stream"]["parity"], "left": in_order}, **found}


def spread() -> dict[str, list[dict[str, Any]]]:
    """The table of ways, and the lengths that are needed."""
    cases = [(loss, burst) for loss in LOSSES for burst in BURSTS]
    return {
        "ways": [
            {"loss": loss, "burst": burst, "packets": n, "by": ways(n, loss, burst)}
            for loss, burst in cases
            if burst > 1
            for n in LENGTHS
        ],
        "needed": [
            {"loss": loss, "burst": burst, "packets": needed(loss, burst)} for loss, burst in cases
        ],
    }
