"""Steps of DropCompute as data: one rank's record, the ranks' sums, and the report over steps."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .threshold import Table


@dataclass(slots=True)
class StepRecord:
    wanted: int  # micro-batches of a full step of this rank
    laps: list[float] = field(default_factory=list)
    """Seconds of each micro-batch that was handed out."""
    completed: int = 0  # micro-batches whose backward pass added to a gradient
    returned: list[Any] = field(default_factory=list)
    """The last micro-batch, if it was left before its backward pass for being late. It counts as
    dropped, and comes again."""
    stopped: bool = False  # whether the threshold ended the step

    @property
    def used(self) -> int:
        """Micro-batches that do not come again."""
        return len(self.laps) - len(self.returned)

    @property
    def dropped(self) -> int:
        return self.wanted - self.used if self.stopped else 0

    @property
    def skipped(self) -> int:
        """Micro-batches that were handed out without a backward pass, and not for being late."""
        return self.used - self.completed

    @property
    def seconds(self) -> float:
        return sum(self.laps)

    @property
    def saved(self) -> float:
        """Seconds that the dropped micro-batches would have taken."""
        # A slow phase lasts, so the step's own pace counts. The lower median distrusts a clock
        # that jumps.
        return self.dropped * (statistics.median_low(self.laps) if self.laps else 0.0)


class StepSums(NamedTuple):
    """The ranks' sums at the end of a step: one rank's addends, or the totals over all ranks."""

    completed: float  # micro-batches
    dropped: float  # micro-batches
    outdated: float  # ranks whose threshold is to be measured again
    warm_up_left: float  # steps until the threshold is due; the same on all ranks
    # the square of ``warm_up_left``; the sums show by it whether ranks differ
    warm_up_left_squared: float
    threshold: float  # seconds, 0 while nothing is dropped; the same on all ranks
    unfinished: float  # ranks that have more batches

    def pack(self, grad_flags: Tensor) -> Tensor:
        sums = torch.tensor(self, dtype=torch.float64, device="cpu")
        return torch.cat([sums, grad_flags])

    @classmethod
    def unpack(cls, packed: Tensor, share: float) -> StepSums:
        return cls(*(packed[:FIELDS] * share).tolist())

    def warm_up_differs(self, ranks: int) -> bool:
        mean = self.warm_up_left / ranks
        return self.warm_up_left_squared / ranks - mean * mean > 1e-6


FIELDS: Final = len(StepSums._fields)  # elements of a packed StepSums, before the flags


@dataclass(frozen=True, slots=True)
class DropStep:
    """One step of :class:`~lossycoll.DropCompute`.

    Attributes:
        completed: Micro-batches of this rank whose backward pass counts.
        dropped: Micro-batches that this rank dropped because of the threshold.
        seconds: This rank's compute, the loading of data included.
        total_completed: ``completed`` over all ranks.
        total_dropped: ``dropped`` over all ranks.
        factor: Factor of the gradients' mean over the ranks.
    """

    completed: int
    dropped: int
    seconds: float
    total_completed: int
    total_dropped: int
    factor: float


@dataclass(frozen=True, slots=True)
class DropReport:
    """Report of one rank of :class:`~lossycoll.DropCompute` so far.

    Attributes:
        rank: This rank in the group.
        steps: Steps so far.
        completed: Micro-batches whose backward pass counts.
        dropped: Micro-batches dropped because of the threshold.
        skipped: Micro-batches that were handed out, but had no backward pass.
        seconds: Compute, the loading of data included.
        saved: Seconds that the dropped micro-batches would have taken, at the median of their step.
        threshold: Seconds; inf while nothing is dropped.
        choices: Number of times that the threshold was measured.
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
        """Share of all ranks' micro-batches that was dropped."""
        wanted = self.total_completed + self.total_dropped
        return self.total_dropped / wanted if wanted else 0.0


OF_A_STEP: Final = ("completed", "dropped", "skipped", "seconds", "saved")


def after_step(report: DropReport, record: StepRecord, sums: StepSums, factor: float) -> DropReport:
    completed, dropped = round(sums.completed), round(sums.dropped)
    return replace(
        report,
        steps=report.steps + 1,
        **{name: getattr(report, name) + getattr(record, name) for name in OF_A_STEP},
        total_completed=report.total_completed + completed,
        total_dropped=report.total_dropped + dropped,
        last=DropStep(
            completed=record.completed,
            dropped=record.dropped,
            seconds=record.seconds,
            total_completed=completed,
            total_dropped=dropped,
            factor=factor,
        ),
    )


PACKED: Final = [each for each in fields(DropReport) if each.name not in ("rank", "last")]


def pack(report: DropReport) -> Table:
    """A report as numbers (PACKED,): no rank, no last step."""
    return np.array([getattr(report, each.name) for each in PACKED], np.float64)


def unpack(rank: int, row: Table) -> DropReport:
    values: dict[str, Any] = {}
    for each, value in zip(PACKED, row.tolist(), strict=True):
        values[each.name] = int(value) if each.type == "int" else value
    return DropReport(rank, **values)
