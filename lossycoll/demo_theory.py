"""How far apart the replicas of a ShardedOptimizer should be, from how its parameters move.

At loss p a block is k steps old with a chance in proportion to p^k, up to the age at which it is
repaired. So two replicas that both receive it hold values some steps apart, and the owner and
another one k. Where steps are uncorrelated, with second moment s^2, the value of k steps ago is
k s^2 away, and without repair the drift is 2p / (1 - p^2) s^2 (docs/theory.md). Steps of Adam are
correlated, so the distances are taken as they are.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

import lossycoll
from lossycoll.train.ages import MAX_AGE, REPAIR

STEPS: Final = MAX_AGE
"""How far back the owner's values are kept: nothing is older than this."""


class Trail:
    """The last values of the parameters that this rank owns, to be noted after each step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._values: deque[Tensor] = deque(maxlen=STEPS + 1)

    @torch.no_grad()
    def note(self) -> None:
        owned = [p.detach().flatten() for g in self._optimizer.param_groups for p in g["params"]]
        self._values.append(torch.cat(owned).double() if owned else torch.zeros(0).double())

    def expected_drift(self, loss: float) -> float:
        """Squared distance, averaged over pairs of replicas, at this loss: the sum of what all
        ranks own. A collective."""
        latest = self._values[-1]
        moved = torch.stack([(latest - old).square().sum() for old in reversed(self._values)])
        with lossycoll.reliable():
            dist.all_reduce(moved)
        # What is resent is lost anew with the same chance.
        return expected(loss ** (1 + REPAIR), dist.get_world_size(), moved.tolist())


def expected(loss: float, world: int, moved: list[float]) -> float:
    """``moved[k]``: squared distance of the parameters from their values k steps before, k = 0 to
    the greatest age there is.

    Of all pairs of ranks and blocks, the owner is one of the pair in 2 / world.
    """
    weights = [loss**k for k in range(len(moved))]
    ages = [weight / sum(weights) for weight in weights]
    both = sum(a * b * moved[abs(i - j)] for i, a in enumerate(ages) for j, b in enumerate(ages))
    one = sum(age * distance for age, distance in zip(ages, moved, strict=True))
    return (1 - 2 / world) * both + 2 / world * one
