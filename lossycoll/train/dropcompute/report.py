"""What DropCompute has done, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from .step import StepOutcome, StepRecord
from .threshold import NANO, Table


@dataclass(frozen=True, slots=True)
class DropStep:
    """One step of :class:`~lossycoll.DropCompute`.

    Attributes:
        completed: Micro-batches of this rank whose backward pass counts.
        dropped: Micro-batches that this rank dropped because of the threshold.
        seconds: This rank's compute, the loading of data included.
        total_completed: ``completed`` over all ranks.
        total_dropped: ``dropped`` over all ranks.
        factor: What the mean of the gradients over the ranks was multiplied by.
    """

    completed: int
    dropped: int
    seconds: float
    total_completed: int
    total_dropped: int
    factor: float


@dataclass(frozen=True, slots=True)
class DropReport:
    """What one rank of :class:`~lossycoll.DropCompute` has done so far.

    Attributes:
        rank: In the group.
        steps: Steps so far.
        completed: Micro-batches whose backward pass counts.
        dropped: Micro-batches dropped because of the threshold.
        skipped: Micro-batches that were handed out, but had no backward pass.
        seconds: Compute, the loading of data included.
        saved: Seconds that the dropped micro-batches would have taken, at the median of their step.
        threshold: Seconds; inf while nothing is dropped.
        choices: How often the threshold was measured.
        clock_jumps: Readings of the clock that went back, or were not finite.
        total_completed: ``completed`` over all ranks.
        total_dropped: ``dropped`` over all ranks.
        last: The last step; None before it, and for other ranks.
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
    total_dropped: int = 0
    last: DropStep | None = None

    @property
    def drop_rate(self) -> float:
        """The share of all ranks' micro-batches that was dropped."""
        wanted = self.total_completed + self.total_dropped
        return self.total_dropped / wanted if wanted else 0.0


def after_step(report: DropReport, record: StepRecord, outcome: StepOutcome) -> DropReport:
    """A report with one more step of this rank in it."""
    completed, dropped = round(outcome.sums.completed), round(outcome.sums.dropped)
    return replace(
        report,
        steps=report.steps + 1,
        completed=report.completed + record.completed,
        dropped=report.dropped + record.dropped,
        skipped=report.skipped + record.skipped,
        seconds=report.seconds + record.seconds,
        saved=report.saved + record.saved,
        total_completed=report.total_completed + completed,
        total_dropped=report.total_dropped + dropped,
        last=DropStep(
            completed=record.completed,
            dropped=record.dropped,
            seconds=record.seconds,
            total_completed=completed,
            total_dropped=dropped,
            factor=outcome.factor,
        ),
    )


COUNTS: Final = (
    "steps",
    "completed",
    "dropped",
    "skipped",
    "choices",
    "clock_jumps",
    "total_completed",
    "total_dropped",
)
SECONDS: Final = ("seconds", "saved", "threshold")


def pack(report: DropReport) -> Table:
    """A report as int64 (COUNTS + SECONDS,), seconds in ns, -1 for inf; no rank, no last step."""
    seconds = [getattr(report, name) for name in SECONDS]
    in_ns = [round(s * NANO) if math.isfinite(s) else -1 for s in seconds]
    return np.array([*(getattr(report, name) for name in COUNTS), *in_ns], np.int64)


def unpack(rank: int, row: Table) -> DropReport:
    """The inverse of :func:`pack`."""
    values: list[int] = row.tolist()
    counts, in_ns = values[: len(COUNTS)], values[len(COUNTS) :]
    seconds = [ns / NANO if ns >= 0 else math.inf for ns in in_ns]
    named: dict[str, Any] = {
        **dict(zip(COUNTS, counts, strict=True)),
        **dict(zip(SECONDS, seconds, strict=True)),
    }
    return DropReport(rank, **named)
