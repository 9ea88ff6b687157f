"""Drift that the demo's replicas should have, from how parameters move and what is lost.

Of q of the packets nothing arrives, after parity or resending has brought back what it could.
Distances are squared, and means over all pairs of replicas.

ShardedOptimizer (:class:`OwnersTrail`): each element has an owner, whose value the others hold as
it was k steps ago, with a chance in proportion to q^k, up to the age at which it is repaired. So
two replicas that both receive it hold values some steps apart, and the owner and another one k.
Where steps are uncorrelated, with second moment s^2, the value of k steps ago is k s^2 away, and
without repair the drift is 2q / (1 - q^2) s^2 (docs/theory.md). Steps of Adam are correlated, so
the distances are taken as they are.

DriftBound (:class:`OwnSteps`): each replica steps by itself. An element that was brought to one
value just before the last k steps is as far apart as what these have added to it, each replica's
its own. That is D(k), measured from those steps alone, however they are correlated. After each step
there are as many elements with k = 1 as with 2, ..., period, so the drift is the mean of these
D(k); and each sweep that was missed adds D(period), as if steps that far apart weren't correlated.
Where D(k) is k g, this is the formula of docs/theory.md.
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
        self._values = deque([_row(optimizer)], maxlen=MAX_AGE + 1)
        optimizer.register_step_post_hook(self._note)

    @torch.no_grad()
    def _note(self, *_: Any) -> None:
        self._values.append(_row(self._optimizer))

    @torch.no_grad()
    def expected_drift(self) -> float:
        """Squared distance of all parameters, averaged over pairs of replicas. A collective."""
        values = _padded(self._values, MAX_AGE + 1)
        moved = torch.stack([(values[0] - old).square().sum() for old in values])
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
        self._period = period
        self._missed = min(loss, MAX_MISSING)
        self._before = _row(optimizer)[::STRIDE]
        self._scale = len(_row(optimizer)) / len(self._before)
        self._sums = deque([torch.zeros_like(self._before)], maxlen=period + 1)
        optimizer.register_step_pre_hook(self._note_before)
        optimizer.register_step_post_hook(self._note_after)

    @torch.no_grad()
    def _note_before(self, *_: Any) -> None:
        self._before = _row(self._optimizer)[::STRIDE]

    @torch.no_grad()
    def _note_after(self, *_: Any) -> None:
        step = _row(self._optimizer)[::STRIDE] - self._before
        self._sums.append(self._sums[-1] + step)

    @torch.no_grad()
    def expected_drift(self) -> float:
        """Squared distance of all parameters, averaged over pairs of replicas. A collective."""
        sums = _padded(self._sums, self._period + 1)
        added = torch.stack([sums[0] - old for old in sums])
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


def _padded(kept: Sequence[Tensor], length: int) -> list[Tensor]:
    """The latest first, and the first one again for the steps before it."""
    latest_first = list(reversed(kept))
    return latest_first + [kept[0]] * (length - len(kept))


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
