"""What DropCompute tells of itself, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lossycoll.train.drop_ranks import Table

from .threshold import NANO


@dataclass(frozen=True, slots=True)
class DropStep:
    """The last step. ``completed``, ``dropped`` and ``seconds`` are this rank's."""

    completed: int
    dropped: int
    seconds: float
    """Of compute, the loading of data included."""
    total_completed: int
    """At all ranks."""
    total_dropped: int
    factor: float
    """By which the mean over the ranks was multiplied."""


@dataclass(frozen=True, slots=True)
class DropReport:
    """One rank's steps so far.

    ``completed``: micro-batches whose backward pass counts. ``dropped``: those that it didn't begin
    because of the threshold. ``skipped``: handed out, but no backward pass came of them.
    ``seconds``: of compute. ``saved``: seconds that the dropped ones would have taken, at the
    median of their step. ``threshold``: seconds; inf while nothing is dropped. ``choices``: how
    often it was measured. ``clock_jumps``: readings of the clock that can't be.
    """

    rank: int
    steps: int = 0
    completed: int = 0
    dropped: int = 0
    skipped: int = 0
    seconds: float = 0.0
    saved: float = 0.0
    threshold: float = math.inf
    choices: int = 0
    clock_jumps: int = 0
    total_completed: int = 0
    """At all ranks."""
    total_dropped: int = 0
    last: DropStep | None = None

    @property
    def drop_rate(self) -> float:
        """Share of all ranks' micro-batches that were dropped."""
        wanted = self.total_completed + self.total_dropped
        return self.total_dropped / wanted if wanted else 0.0


_WHOLE = (
    "steps",
    "completed",
    "dropped",
    "skipped",
    "choices",
    "clock_jumps",
    "total_completed",
    "total_dropped",
)
_SECONDS = ("seconds", "saved", "threshold")


def to_row(report: DropReport) -> Table:
    """All but the last step, int64; seconds in ns, -1 for inf."""
    seconds = [getattr(report, name) for name in _SECONDS]
    in_ns = [round(s * NANO) if math.isfinite(s) else -1 for s in seconds]
    return np.array([*(getattr(report, name) for name in _WHOLE), *in_ns], np.int64)


def of_row(rank: int, row: Table) -> DropReport:
    """The inverse of :func:`to_row`."""
    values = [int(value) for value in row]
    whole = dict(zip(_WHOLE, values, strict=False))
    in_ns = values[len(_WHOLE) :]
    seconds = [ns / NANO if ns >= 0 else math.inf for ns in in_ns]
    return DropReport(rank, **whole, **dict(zip(_SECONDS, seconds, strict=True)))  # type: ignore[arg-type]
