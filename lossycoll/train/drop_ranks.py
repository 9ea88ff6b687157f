"""What the ranks of DropCompute tell each other: sums and tables that lose nothing, in groups of
any backend, and without a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..errors import PeerLostError
from .common.collectives import Exchange, Work
from .common.consistency import Meant, as_lines, check_same

Table = NDArray[np.int64]


class Ranks:
    """``group``: None is the default one, or where there is none, this process alone. ``device``:
    that the group's tensors are on."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        self._exchange = None if alone else Exchange(group, 0)
        self.device = device
        self.rank = 0 if self._exchange is None else self._exchange.rank
        self.world = 1 if self._exchange is None else self._exchange.world

    def __str__(self) -> str:
        return f"rank {self.rank}/{self.world}"

    @property
    def group(self) -> dist.ProcessGroup | None:
        return None if self._exchange is None else self._exchange.group

    @property
    def left(self) -> int:
        """How many ranks there are, apart from those that the last collective was made without; the
        same on all ranks."""
        return self.world - (0 if self._exchange is None else len(self._exchange.lost_alike()))

    def start_sum(self, tensor: Tensor) -> Work | None:
        """Starts to add ``tensor`` (floats) up over the ranks, in place; None: there is nobody
        else. Where a lossy group goes on without a rank it becomes the mean over those that are
        left, times the world.
        """
        if self._exchange is None or self.world == 1:
            return None
        return self._exchange.combine(tensor, dist.ReduceOp.SUM)

    def share(self, row: Table) -> Table:
        """Every rank's ``row`` (of one shape on all): int64 (world, ...). Zeros for a rank that a
        lossy group goes on without."""
        if self._exchange is None or self.world == 1:
            return row[None]
        table = torch.zeros((self.world, *row.shape), dtype=torch.int64, device=self.device)
        table[self.rank] = torch.from_numpy(row)
        # A sum of integers is over those that are left, a gathering needs all.
        self._exchange.combine(table, dist.ReduceOp.SUM).wait()
        out: Table = table.cpu().numpy()
        return out

    def goes_on_without(self, error: PeerLostError) -> bool:
        """Whether the group outlives the loss that ``error`` is about."""
        return self._exchange is not None and self._exchange.goes_on_without(error)

    def check_alike(self, settings: Mapping[str, Any]) -> None:
        """Raises MismatchError, on all ranks, where they were given different ``settings``."""
        if self.group is not None:
            check_same(
                [Meant(self.group, as_lines(settings), self.device)],
                "DropCompute is made differently",
                "all ranks need the same arguments",
            )
