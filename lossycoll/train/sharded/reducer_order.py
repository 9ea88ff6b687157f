"""One order for all gradient reducers that share a group, the same on all ranks.

A single reducer sends its buckets while the backward pass goes on. Of several, one rank's pass may
touch some and another's pass others, in any order. So they wait until the pass ends, the ranks
agree on which were touched anywhere, and those send, in the order in which they were made.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import TrainingError
from lossycoll.train.common.collectives import Collectives


class OrderedReducer(Protocol):
    """What the order needs of a reducer."""

    @property
    def is_open(self) -> bool:
        """Whether a pass has touched it that it hasn't sent."""

    @property
    def is_used(self) -> bool:
        """Whether it still has any of its parameters."""

    def send(self) -> None:
        """Sends all buckets."""


class ReducerOrder:
    """The reducers of one group, in the order in which they were made.

    The ranks agree on who is among them: one rank may have deleted an optimizer that another's
    garbage still contains.
    """

    def __init__(self) -> None:
        self._reducers: list[weakref.ref[OrderedReducer]] = []

    @property
    def is_single(self) -> bool:
        """Whether there are no others to wait for."""
        return len(self._reducers) < 2

    def join(self, reducer: OrderedReducer, collectives: Collectives) -> None:
        """Adds one that was made. All ranks must call this."""
        if self._reducers:
            used = _flags(found is not None and found.is_used for found in self._found())
            collectives.all_reduce(used, dist.ReduceOp.MAX).wait()
            self._keep(used)
        self._reducers.append(weakref.ref(reducer))

    def finish(self, reducer: OrderedReducer, collectives: Collectives) -> None:
        """Sends a reducer whose pass has ended, and all others that a pass has touched at any rank.

        TrainingError: one of those is at some ranks only.
        """
        found = self._found()
        if self.is_single or reducer not in found:
            reducer.send()
            return
        flags = torch.stack([
            _flags(one is not None and (one is reducer or one.is_open) for one in found),
            _flags(one is not None and one.is_used for one in found),
            _flags(one is None for one in found),
        ])  # fmt: skip
        collectives.all_reduce(flags, dist.ReduceOp.MAX).wait()
        touched, used, gone = flags
        if bool((touched & gone).any()):
            raise TrainingError(
                f"{collectives}: a backward pass has gradients for a ShardedOptimizer that not all "
                f"ranks have any more; delete it on all ranks, or on none"
            )
        failure: Exception | None = None
        for one, flag in zip(found, touched.tolist(), strict=True):
            if flag and one is not None:
                try:
                    one.send()
                except Exception as error:  # the others send on all ranks
                    failure = failure or error
        self._keep(used)
        if failure is not None:
            raise failure

    def _found(self) -> Sequence[OrderedReducer | None]:
        return [reference() for reference in self._reducers]

    def _keep(self, used: Tensor) -> None:
        """Those that any rank still uses."""
        self._reducers = [one for one, flag in zip(self._reducers, used, strict=True) if flag]


def order_of(group: dist.ProcessGroup) -> ReducerOrder:
    """The order of a group's reducers; there is one for each group."""
    return _orders.setdefault(group, ReducerOrder())


def _flags(values: Iterable[bool]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.uint8)


_orders: Final[weakref.WeakKeyDictionary[dist.ProcessGroup, ReducerOrder]] = (
    weakref.WeakKeyDictionary()
)
