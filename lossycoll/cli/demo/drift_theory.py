"""Drift that the demo's replicas should have, from how parameters move and what is lost.

docs/demo-theory.md derives it. Distances are squared, and means over all pairs of replicas.
ShardedOptimizer (:class:`OwnersTrail`) leaves receivers with values of some steps ago, DriftBound
(:class:`OwnSteps`) leaves each replica with its own steps since the last sweep. Steps of Adam are
correlated, so distances are taken as they are, and not as the formulas of docs/theory.md have them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

import lossycoll
from lossycoll.train.common.delivery import MAX_MISSING
from lossycoll.train.sharded.parameter_sync import MAX_AGE, PROBE_EVERY, TOO_MANY

STRIDE: Final = 31
"""OwnSteps keeps one element in so many, a dozen of each packet. Prime, so that it meets all
columns of matrices whose width is a power of two."""


class OwnersTrail:
    """The last values of the parameters that this rank owns, kept from now on after each step.
    ``optimizer``: a ShardedOptimizer with the default ``max_age``, which says what is missing."""

    def __init__(self, optimizer: lossycoll.ShardedOptimizer) -> None:
        self._optimizer = optimizer
        # All replicas are equal now, so nothing is ever older than this.
        self._values = deque([_row(optimizer)] * (MAX_AGE + 1), maxlen=MAX_AGE + 1)
        optimizer.register_step_post_hook(self._note)

    def _note(self, *_: Any) -> None:
        self._values.append(_row(self._optimizer))

    def expected_drift(self) -> float:
        """Squared distance of all parameters, averaged over pairs of replicas. A collective."""
        latest = self._values[-1]
        moved = torch.stack([(latest - old).square().sum() for old in reversed(self._values)])
        figures = self._optimizer.stats()
        counted = torch.tensor([figures.stale, figures.blocks], dtype=torch.float64, device="cpu")
        with lossycoll.reliable():
            dist.all_reduce(moved)
            dist.all_reduce(counted)
        missed = float(counted[0] / counted[1].clamp(min=1))
        return stale_drift(moved.tolist(), dist.get_world_size(), missed)


class OwnSteps:
    """Sums of this rank's own steps over a sample of the parameters, whatever else changes them.

    Attach it after the DriftBound of this ``period`` and the default means that it is about:
    hooks run in order of registration, and what DriftBound moves before a step isn't part of it.
    """

    def __init__(self, optimizer: Optimizer, period: int, loss: float) -> None:
        self._optimizer = optimizer
        self._missed = min(loss, MAX_MISSING)
        self._before = _row(optimizer)[::STRIDE]
        self._scale = len(_row(optimizer)) / len(self._before)
        zeros = torch.zeros_like(self._before)
        self._sums = deque([zeros] * (period + 1), maxlen=period + 1)
        optimizer.register_step_pre_hook(self._note_before)
        optimizer.register_step_post_hook(self._note_after)

    def _note_before(self, *_: Any) -> None:
        self._before = _row(self._optimizer)[::STRIDE]

    def _note_after(self, *_: Any) -> None:
        step = _row(self._optimizer)[::STRIDE] - self._before
        self._sums.append(self._sums[-1] + step)

    def expected_drift(self) -> float:
        """Squared distance of all parameters, averaged over pairs of replicas. A collective."""
        added = torch.stack([self._sums[-1] - old for old in reversed(self._sums)])
        world = dist.get_world_size()
        mean = added.clone()
        with lossycoll.reliable():
            dist.all_reduce(mean)
            apart = (added - mean / world).square().sum(1)
            dist.all_reduce(apart)
        apart *= self._scale * 2 / (world - 1)
        return bounded_drift(apart.tolist(), world, self._missed)


def _row(optimizer: Optimizer) -> Tensor:
    """All that it steps at this rank, one after another, in double precision."""
    held = [p.detach().flatten() for entry in optimizer.param_groups for p in entry["params"]]
    return torch.cat(held).double() if held else torch.zeros(0, dtype=torch.float64, device="cpu")


def stale_drift(moved: Sequence[float], world: int, missed: float) -> float:
    """The drift under ShardedOptimizer with max_age="auto".

    ``moved[k]``: squared distance of the parameters from their values k steps before, k = 0 to
    MAX_AGE. ``missed``: the chance q that a block doesn't come in a step.
    """
    if missed > TOO_MANY:
        # All owners are behind: of their blocks one in PROBE_EVERY may be stale, the same one for
        # all replicas, and for one step.
        return drift_by_age([1 - missed, missed], moved, world) / PROBE_EVERY
    weights = [missed**k for k in range(len(moved))]
    return drift_by_age([weight / sum(weights) for weight in weights], moved, world)


def drift_by_age(ages: Sequence[float], moved: Sequence[float], world: int) -> float:
    """``ages[k]``: the chance that what a receiver holds is k steps old, each receiver for itself.
    Of all pairs of ranks and blocks, the owner is one of the pair in 2 / world."""
    both = sum(a * b * moved[abs(i - j)] for i, a in enumerate(ages) for j, b in enumerate(ages))
    one = sum(age * moved[k] for k, age in enumerate(ages))
    return (1 - 2 / world) * both + 2 / world * one


def bounded_drift(apart: Sequence[float], world: int, missed: float) -> float:
    """The drift under DriftBound.

    ``apart[k]``: D(k), the squared distance that the replicas' own steps add in k steps, k = 0 to
    the period. ``missed``: the chance q that a rank misses a packet of a slice.
    """
    within, sweep = apart[1:], apart[-1]
    together = 2 / world * (1 - missed) + (1 - 2 / world) * (1 - missed) ** 2
    return sum(within) / len(within) + sweep * (1 - together) / together
