"""What is measured, as data: wires, the parts of the benchmark, and its goals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.common.results import Piece

KIB, MIB = 1 << 10, 1 << 20

WIRES = {"lo": 0, "veth-1500": 1500, "veth-9000": 9000}
"""Name and MTU: this host's loopback (0), or hosts of the laboratory on the kernel's bridge."""
RANKS = (2, 4)
SIZES = {
    "all_reduce": (4 * KIB, MIB, 4 * MIB, 25 * MIB, 100 * MIB),
    "broadcast": (4 * KIB, MIB, 25 * MIB),
    "all_gather": (4 * KIB, MIB, 25 * MIB),
}
"""Bytes by collective. Of all_gather: of what every rank has in the end."""
PATH_SIZES = (MIB, 25 * MIB)
RAW_SIZES = (25 * MIB, 100 * MIB)
BUCKETS = (25 * MIB, 100 * MIB)
"""DDP's default, and what a large model makes of it."""
FLAT_SIZES = (4 * KIB, 64 * KIB, 256 * KIB, MIB)
FLAT_OPERATIONS = 10_000

GOAL_TWO, GOAL_MORE = 3.0, 2.5
"""Bus bandwidth against gloo's: at 4 MiB and above with 2 ranks, and elsewhere."""
GOAL_SMALL = 0.5
"""p50 and p99 of 4 KiB against gloo's."""
GOAL_CPU = 1.0
"""CPU seconds per byte against gloo's."""
GOAL_RAW = 0.8
"""Of the rate of bare sockets."""
GOAL_MEMORY = 2.0
"""Peak beyond the tensors, in buckets."""

RAW_BASE = "as the engine does"
RAW: dict[str, tuple[str, ...]] = {
    RAW_BASE: (),
    "sleeping in poll": ("--wait", "sleep"),
    "spinning": ("--wait", "spin"),
    "SO_BUSY_POLL of 50 us, sleeping": ("--wait", "sleep", "--busy-poll", "50"),
    "nothing to gather": ("--in-place",),
    "nothing to gather, MSG_ZEROCOPY": ("--zerocopy",),
    "io_uring": ("--io-uring",),
}
"""Trials with bare sockets, and the switches of raw_duplex for them."""
PINGS = ("sleeping in poll", RAW_BASE, "spinning", "SO_BUSY_POLL of 50 us, sleeping")
"""Those of which round trips are measured, too."""


@dataclass(frozen=True)
class Job(Piece):
    """Ranks that are started together, and what they measure: one line of the results."""

    part: str
    wire: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.part}, {self.wire}, {self.ranks} ranks"


PARTS = ("collectives", "raw", "paths", "memory")


def jobs() -> Iterator[Job]:
    for ranks in RANKS:
        for wire in WIRES:
            yield Job("collectives", wire, ranks)
    for part in ("raw", "paths"):
        for wire in WIRES:
            yield Job(part, wire, 2)
    yield Job("memory", "lo", 2)


def bus_factor(collective: str, ranks: int) -> float:
    """Bytes that a rank has to send, and to receive, per byte of size (nccl-tests)."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if collective == "broadcast" else (ranks - 1) / ranks


def goal(collective: str, ranks: int, size: int) -> float | None:
    """Of bus bandwidth against gloo's; None where latency is what is asked of it."""
    if size < MIB:
        return None
    return GOAL_TWO if ranks == 2 and size >= 4 * MIB else GOAL_MORE
