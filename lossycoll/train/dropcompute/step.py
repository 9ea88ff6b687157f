"""One step as data: what one rank did in it, and what the ranks add up when it ends."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What this rank did in one step."""

    laps: Sequence[float]
    """Seconds of each micro-batch that was handed out."""
    completed: int
    """Micro-batches whose backward pass added to a gradient."""
    returned: int
    """1 if the last micro-batch was left before its backward pass because it was late, else 0. It
    counts as dropped, and comes again."""
    wanted: int
    """Micro-batches of a full step of this rank."""
    stopped: bool
    """Whether the threshold ended the step."""

    @property
    def used(self) -> int:
        """Micro-batches that do not come again."""
        return len(self.laps) - self.returned

    @property
    def dropped(self) -> int:
        """Micro-batches that were dropped because of the threshold."""
        return self.wanted - self.used if self.stopped else 0

    @property
    def skipped(self) -> int:
        """Micro-batches that were handed out without a backward pass, and not for being late."""
        return self.used - self.completed

    @property
    def seconds(self) -> float:
        """Of compute, the loading of data included."""
        return sum(self.laps)

    @property
    def saved(self) -> float:
        """Seconds that the dropped micro-batches would have taken."""
        # A slow phase lasts, so the step's own pace counts. The lower median distrusts a clock
        # that jumps.
        return self.dropped * (statistics.median_low(self.laps) if self.laps else 0.0)


@dataclass(frozen=True, slots=True)
class StepSums:
    """The ranks' sums at the end of a step: one rank's addends, or the totals over all ranks."""

    completed: float
    """Micro-batches."""
    dropped: float
    """Micro-batches."""
    outdated: float
    """Ranks whose threshold is to be measured again."""
    warm_up_left: float
    """Steps until the threshold is due; the same on all ranks."""
    # the square of ``warm_up_left``; the sums show by it whether ranks differ
    warm_up_left_squared: float
    threshold: float
    """Seconds, 0 while nothing is dropped; the same on all ranks."""
    unfinished: float
    """Ranks that have more batches."""

    def pack(self, grad_flags: Tensor) -> Tensor:
        """The addends, and the flags, float64 (n,), after them: float64 (FIELDS + n,)."""
        return torch.cat([torch.tensor(astuple(self), dtype=torch.float64), grad_flags])

    @classmethod
    def unpack(cls, packed: Tensor, share: float) -> StepSums:
        """The inverse of :meth:`pack` for sums over ranks, times ``share``; without the flags."""
        return cls(*(packed[:FIELDS] * share).tolist())

    def warm_up_differs(self, ranks: int) -> bool:
        """Whether the ``ranks`` that added up have different numbers of warm-up steps left.

        Their variance isn't 0 then.
        """
        mean = self.warm_up_left / ranks
        return self.warm_up_left_squared / ranks - mean * mean > 1e-6


FIELDS: Final = len(fields(StepSums))
"""Elements of a packed StepSums, before the flags."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The figures that all ranks know once a step is averaged."""

    sums: StepSums  # over the ranks
    ranks: int
    """How many took part."""
    factor: float
    """Between the mean over the ranks and the mean over the completed micro-batches."""
