"""What a small bucket would gain from fewer owners, whose streams are longer, and what it would
cost. Parity is what the engine would choose for a share of 1% missing."""

from __future__ import annotations

from typing import Any, Final, TypedDict

from lossycoll.plan.sets import NO_PARITY
from tests.oracle.parity import shape_of
from tests.oracle.recovery import Ask, Means, choose

from .parity import left_missing

MAX_MISSING: Final = 0.01
LOSSES = (0.1, 0.2)
BURSTS = (1.0, 4.0, 8.0)
PACKETS = (12, 24, 48)
"""Of a stream where every rank is an owner."""
LONGER = (1, 2, 4, 8)
"""Times as long streams of a bucket with fewer owners are: ranks / owners."""
DRAWN: Final = 400_000


class Loss(TypedDict):
    """Share of packets that a path loses, and their mean run."""

    loss: float
    burst: float


HARD: Final[Loss] = {"loss": 0.2, "burst": 8.0}
HARD_PACKETS: Final = 24
WORLD: Final = 8
RTT_S: Final = 0.02
RATES: Final = {"1 Gbit/s": 125e6, "10 Gbit/s": 1.25e9}


def chosen(packets: int, loss: float, burst: float, rounds: int = 0, rate: float = 125e6) -> Means:
    """The engine's choice for a stream; the arithmetic of rows is taken to cost nothing."""
    ask = Ask(packets, loss=loss, burst=burst, rtt_s=RTT_S, rate=rate, row_rate=0.0)
    return choose(Ask(**{**vars(ask), "max_missing": MAX_MISSING, "rounds": rounds}))


def parity_of(means: Means, packets: int) -> float:
    """Parity packets for each data packet."""
    if means.code == NO_PARITY:
        return 0.0
    return len(shape_of(means.code, packets).of_parity) / packets


def busiest(world: int, owners: int) -> float:
    """What an owner sends, as a multiple of what a rank sends where all are owners.

    Its contributions to the other owners, and the mean of its segment to all; segments are
    ``world / owners`` times as long.
    """
    return world / owners * (world + owners - 2) / (2 * (world - 1))


def seconds(owners: int, rounds: int, rate: float) -> tuple[float, Means]:
    """Of the two steps of an all-reduce in the hard case, where the rate of a rank's port is what
    limits it: an owner receives what all others contribute, then sends them all the mean."""
    packets = HARD_PACKETS * WORLD // owners
    means = chosen(packets, **HARD, rounds=rounds, rate=rate)
    one = packets * Ask(packets).packet_bytes / rate
    share = parity_of(means, packets)
    waits = means.seconds - one * share
    return 2 * ((WORLD - 1) * one * (1 + share) + waits + RTT_S / 2), means


def longer_streams() -> list[dict[str, Any]]:
    """What is left missing by length, without resending."""
    rows = []
    for loss in LOSSES:
        for burst in BURSTS:
            for packets in PACKETS:
                cells = {}
                for times in LONGER:
                    means = chosen(packets * times, loss, burst)
                    parity = parity_of(means, packets * times)
                    cells[str(times)] = {"parity": parity, "left": means.expected}
                rows.append({"loss": loss, "burst": burst, "packets": packets, "by_times": cells})
    return rows


def hard_case() -> list[dict[str, Any]]:
    """Fewer owners against resending: what is left, drawn too, and what it takes."""
    rows = []
    for owners, rounds in ((8, 0), (4, 0), (2, 0), (1, 0), (8, 1), (8, 2)):
        _, means = seconds(owners, rounds, RATES["1 Gbit/s"])
        packets = HARD_PACKETS * WORLD // owners
        drawn = None
        if not rounds:
            drawn = left_missing(packets, means.code, **HARD, drawn=DRAWN).measured
        rows.append(
            {
                "owners": owners,
                "rounds": rounds,
                "left": means.expected,
                "drawn": drawn,
                "busiest": busiest(WORLD, owners),
                "seconds": {name: seconds(owners, rounds, rate)[0] for name, rate in RATES.items()},
            }
        )
    return rows


def owners() -> dict[str, list[dict[str, Any]]]:
    """Both tables."""
    return {"longer": longer_streams(), "hard": hard_case()}
