"""The reducers that share a group: one order for all of them, the same on all ranks.

A reducer that is alone sends its buckets while the backward pass goes on. Of several, one rank's
pass may touch some and another's others, in whatever order. So they wait until the pass ends, the
ranks tell each other which were touched anywhere, and those send, in the order in which they were
made.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import TrainingError
from lossycoll.train.common.collectives import Exchange


class Member(Protocol):
    """What a roster knows of a reducer. ``is_open``: whether a pass has touched it that it hasn't
    sent. ``is_used``: whether it still has any of its parameters. ``send``: sends them all."""

    @property
    def is_open(self) -> bool: ...
    @property
    def is_used(self) -> bool: ...
    def send(self) -> None: ...


class Roster:
    """Of one group. Who is on it is agreed upon by the ranks, as one may have forgotten an
    optimizer that another's garbage still has."""

    def __init__(self) -> None:
        self._members: list[weakref.ref[Member]] = []

    @property
    def is_single(self) -> bool:
        """Whether there are no others to wait for."""
        return len(self._members) < 2

    def join(self, member: Member, exchange: Exchange) -> None:
        """Adds one that was made. All ranks must call this."""
        if self._members:
            used = _flags(found is not None and found.is_used for found in self._found())
            exchange.combine(used, dist.ReduceOp.MAX).wait()
            self._keep(used)
        self._members.append(weakref.ref(member))

    def finish(self, member: Member, exchange: Exchange) -> None:
        """``member`` has to send, and all others that a pass has touched at any rank send, too."""
        found = self._found()
        if self.is_single or member not in found:
            member.send()
            return
        told = torch.stack([
            _flags(one is not None and (one is member or one.is_open) for one in found),
            _flags(one is not None and one.is_used for one in found),
            _flags(one is None for one in found),
        ])  # fmt: skip
        exchange.combine(told, dist.ReduceOp.MAX).wait()
        touched, used, gone = told
        if bool((touched & gone).any()):
            raise TrainingError(
                f"{exchange}: a backward pass has gradients for a ShardedOptimizer that not all "
                f"ranks have any more; delete it on all ranks, or on none"
            )
        failure: Exception | None = None
        for one, flag in zip(found, touched.tolist(), strict=True):
            if flag and one is not None:
                try:
                    one.send()
                except Exception as error:  # the others' turn comes on all ranks
                    failure = failure or error
        self._keep(used)
        if failure is not None:
            raise failure

    def _found(self) -> Sequence[Member | None]:
        return [reference() for reference in self._members]

    def _keep(self, used: Tensor) -> None:
        """Those that any rank still uses."""
        self._members = [one for one, flag in zip(self._members, used, strict=True) if flag]


def roster_of(group: dist.ProcessGroup) -> Roster:
    """The one roster of ``group``."""
    return _rosters.setdefault(group, Roster())


def _flags(values: Iterable[bool]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.uint8)


_rosters: Final[weakref.WeakKeyDictionary[dist.ProcessGroup, Roster]] = weakref.WeakKeyDictionary()
