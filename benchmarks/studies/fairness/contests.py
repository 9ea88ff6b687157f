"""What is measured, as data: who shares a link with a lossy job."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.common.results import Piece

MBIT, RTT_MS, QUEUE_MS = 100.0, 20.0, 25.0
LATER = 5.0
"""Seconds after which the second begins."""


@dataclass(frozen=True)
class Contest(Piece):
    """A lossy job, and what comes ``LATER`` seconds later: "job", or TCP's congestion control."""

    beside: str
    loss: float

    @property
    def name(self) -> str:
        other = "a second job" if self.beside == "job" else f"TCP {self.beside}"
        return f"{other}, {self.loss:.1%} lost" if self.loss else other


CONTESTS = (Contest("job", 0.0), Contest("job", 0.01), Contest("cubic", 0.0), Contest("bbr", 0.0))
