"""What is tried, as data: networks, operations, and what changes in the middle of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.common.results import Piece
from lossycoll.lab.network import Link, Network, Port

LOSS = 0.01
"""On every link: so nearly every stream lacks something, and has to be ended."""
MBIT = 100.0
PORT = Port(up_mbit=MBIT, down_mbit=MBIT, queue_ms=25)


@dataclass(frozen=True)
class Change:
    """When operation ``at`` begins. ``pause``: seconds for which rank ``host`` is stopped, after
    ``after`` seconds. Else fields of the link ``pair`` (None: of all links)."""

    at: int
    pause: float = 0.0
    host: int = 1
    after: float = 0.0
    pair: tuple[int, int] | None = None
    link: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Scenario:
    """``incast``: all send to rank 0 (a reduce_scatter with one part); else all-reduces of ``mib``
    MiB, of which each rank has as much to send."""

    name: str
    title: str
    network: Network
    mib: float
    operations: int
    changes: tuple[Change, ...] = ()
    incast: bool = False


def _rtt(ms: float) -> dict[str, Any]:
    return {"delay_ms": ms / 2}


@dataclass(frozen=True)
class Trial(Piece):
    """A run of the scenario of this name."""

    scenario: str


DEGRADED = (0, 1)
SCENARIOS = (
    Scenario(
        "rtt",
        "round trip of 10, 100, 10 ms",
        Network(hosts=2, link=Link(loss=LOSS, delay_ms=5), port=PORT),
        mib=1,
        operations=150,
        changes=(Change(50, link=_rtt(100)), Change(100, link=_rtt(10))),
    ),
    Scenario(
        "pause",
        "a rank is stopped for 5 s, four times",
        Network(hosts=2, link=Link(loss=LOSS, delay_ms=5), port=PORT),
        mib=1,
        operations=120,
        changes=tuple(Change(24 * (i + 1), pause=5.0, after=0.03 * i) for i in range(4)),
    ),
    Scenario(
        "link",
        "one link of 12 has a tenth of the rate and 10% loss",
        Network(hosts=4, link=Link(loss=LOSS, delay_ms=5), port=PORT),
        mib=1,
        operations=120,
        changes=(
            Change(40, pair=DEGRADED, link={"rate_mbit": MBIT / 10, "queue_ms": 25, "loss": 0.1}),
            Change(80, pair=DEGRADED, link={"rate_mbit": None, "queue_ms": None, "loss": LOSS}),
        ),
    ),
    Scenario(
        "incast",
        "7 ranks send to one, through a queue of 64 packets",
        Network(
            hosts=8,
            link=Link(loss=LOSS, delay_ms=0.1),
            port=Port(up_mbit=MBIT, down_mbit=MBIT, queue_packets=64),
        ),
        mib=0.5,
        operations=80,
        incast=True,
    ),
)
BY_NAME: Mapping[str, Scenario] = {one.name: one for one in SCENARIOS}
