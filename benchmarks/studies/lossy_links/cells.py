"""What is measured, as data: networks, sizes, and variants of all-reduce."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.common import tcp
from benchmarks.common.results import Piece
from lossycoll.lab.network import Link, Network, Port

MIB = 1 << 20
LONGEST_SECONDS = 45.0
QUEUE_MS = 25.0
"""Room before each port, in time at its rate: what a router of today has."""
VARIANTS = ("lossy", "repair", "reliable", "gloo", "gloo-bbr")
"""Lossy with nothing resent, with one round of resending, all resent; torch's gloo over TCP with
the kernel's cubic, and with bbr."""

METHODS = ("ddp+driftbound", "sharded")
"""Training methods whose steps are measured, with their defaults."""
WHAT = {"step": " DDP step", **{name: f" {name} step" for name in METHODS}}


@dataclass(frozen=True)
class Cell(Piece):
    """One network and one size. ``rtt_ms`` without queues; ``loss`` in bursts of ``burst``.

    ``what``: "all-reduce" of ``mib``, "step" of DDP with so many MiB of gradients, or a whole step
    of one of METHODS.
    """

    hosts: int
    mbit: float
    rtt_ms: float
    loss: float
    burst: float
    mib: float
    what: str = "all-reduce"

    @property
    def network(self) -> Network:
        return Network(
            hosts=self.hosts,
            link=Link(loss=self.loss, burst=self.burst, delay_ms=self.rtt_ms / 2),
            port=Port(up_mbit=self.mbit, down_mbit=self.mbit, queue_ms=QUEUE_MS),
        )

    @property
    def limit(self) -> float:
        """Seconds that no all-reduce by two phases can beat: its bytes over the rate, and a way
        for each phase. Headers, handshakes and losses are not in it."""
        share = 2 * (self.hosts - 1) / self.hosts
        return share * self.mib * MIB * 8 / (self.mbit * 1e6) + self.rtt_ms / 1e3

    @property
    def name(self) -> str:
        loss = f"{self.loss:.1%}" + (f" in {self.burst:g}" if self.burst > 1 else "")
        path = f"{self.hosts} hosts, {self.mbit:g} Mbit/s, {self.rtt_ms:g} ms"
        return f"{path}, {loss}, {self.mib:.3g} MiB" + WHAT.get(self.what, "")


def variants(cell: Cell) -> tuple[str, ...]:
    """Those that this kernel has, and that end within ``LONGEST_SECONDS`` seconds or so. A method
    says by itself what is sent again, and only the backend loses anything."""
    if cell.what in METHODS:
        return VARIANTS[:1]
    absent = set() if "bbr" in tcp.controls() else {"gloo-bbr"}
    if cubic_seconds(cell) > LONGEST_SECONDS:
        absent.add("gloo")
    return tuple(variant for variant in VARIANTS if variant not in absent)


def cubic_seconds(cell: Cell) -> float:
    """What cubic takes at least under random loss: sqrt(3 / 2 / loss) packets of 1448 bytes a round
    trip (Mathis, Semke, Mahdavi, Ott, CCR 27(3), 1997), both directions at once."""
    if not cell.loss:
        return cell.limit
    bytes_per_s = 1448 / (cell.rtt_ms / 1e3) * math.sqrt(1.5 / cell.loss)
    share = 2 * (cell.hosts - 1) / cell.hosts
    return max(cell.limit, share * cell.mib * MIB / bytes_per_s)


def gradient_mib() -> float:
    """Of a DDP step."""
    from lossycoll.cli.demo.model import ByteGPT

    from .rank import CONTEXT, LAYERS, WIDTH

    return sum(p.numel() for p in ByteGPT(LAYERS, WIDTH, CONTEXT).parameters()) * 4 / MIB


def cells() -> Iterator[Cell]:
    """The most important first."""
    losses = ((0.01, 1.0), (0.0, 1.0), (0.05, 1.0), (0.01, 8.0), (0.001, 1.0), (0.05, 8.0))
    for hosts, mbit in ((2, 1000.0), (2, 10000.0), (4, 1000.0), (8, 100.0)):
        for loss, burst in losses:
            for rtt_ms in (20.0, 80.0, 0.2):
                for mib in (25.0, 4.0):
                    yield Cell(hosts, mbit, rtt_ms, loss, burst, mib)
                yield Cell(hosts, mbit, rtt_ms, loss, burst, gradient_mib(), "step")
    for hosts, mbit in ((8, 100.0), (4, 1000.0)):
        for loss in (0.01, 0.05):
            for what in METHODS:
                yield Cell(hosts, mbit, 20.0, loss, 1.0, gradient_mib(), what)
