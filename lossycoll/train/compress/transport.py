"""What a compressor needs of a group: a reliable sum, a mean that may lose packets, a gather.

A mean over a lossy group goes in two halves. Its first, to the owners, may lose packets, and each
sender is told which of its contributions its owners did without (docs/engine.md, "Who is told").
Its second, what owners send back, loses nothing. So all ranks have one mean, bit for bit, and each
knows what of its own is in it: that is all that error feedback needs.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.options.fields import reliable
from lossycoll.train.common.collectives import Exchange
from lossycoll.train.common.staleness import Mask

from ...errors import PeerLostError


class Transport(Exchange):
    """The group ``group`` (None: the default one), of any backend."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group, 0)

    @property
    def may_lose(self) -> bool:
        """Whether a mean that starts now may lose packets; the same on all ranks."""
        found = self.lossy
        return found is not None and found.lossy_options().delivery == "lossy" and self.world > 1

    def check_members(self) -> None:
        """Raises PeerLostError, on all ranks alike, if the last collective was made without a rank:
        what it still owed is gone, and the running means are of ranks that aren't there any more.
        """
        lost = self.lost_alike()
        if lost:
            raise PeerLostError(
                f"{self}: rank {lost[0]} is lost, and with it the errors that it still owed; "
                f"restart with the ranks that are left, or call reset() on all of them and use a "
                f"group of theirs",
                peer=lost[0],
            )

    def room(self, numel: int, like: Tensor) -> Tensor:
        """A vector of ``numel`` elements and as many zeros as make it a chunk for each rank."""
        chunk = -(-numel // self.world)
        out = like.new_empty(chunk * self.world)
        out[numel:].zero_()
        return out

    def sum_(self, flat: Tensor) -> None:
        """The sum over the ranks, in place, reliable. One rank's sum is sent to all (or the same
        additions are done once for each element): all have the same bits."""
        with reliable():
            dist.all_reduce(flat, group=self.group)

    def mean(self, flat: Tensor, *, feedback: bool) -> tuple[Tensor, Tensor | None]:
        """(the mean over the ranks of ``flat``, which is one of :meth:`room`'s and stays; which
        elements of it were lost on the way, bool like ``flat``, or None if none were).

        ``feedback``: what is lost counts as zero, and is told. Otherwise the mean is over the
        contributions that arrived, and nothing is told.
        """
        if not self.may_lose:
            total = flat.clone()
            self.sum_(total)
            return total.div_(self.world), None
        assert self.lossy is not None
        own = flat.new_empty(len(flat) // self.world)
        lost: Mask | None = None
        with self.delivery():
            if feedback:
                work = self.lossy.reduce_scatter_blocks(own, flat)
                lost = work.lost
            else:
                dist.reduce_scatter_single(own, flat, dist.ReduceOp.AVG, self.group)
        self.check_members()
        total = torch.empty_like(flat)
        with reliable():
            dist.all_gather_single(total, own, self.group)
        return total, None if lost is None else self._elements(lost, flat)

    def _elements(self, lost: Mask, flat: Tensor) -> Tensor | None:
        """``lost``: bool (world, blocks), by owner."""
        if not lost.any():
            return None
        chunk = len(flat) // self.world
        mask = np.repeat(lost, self.block_elements(flat), axis=1)[:, :chunk]
        return torch.from_numpy(np.ascontiguousarray(mask)).view(-1)

    def stack(self, flat: Tensor) -> Tensor:
        """All ranks' ``flat`` (n,), as (world, n), reliable."""
        out = flat.new_empty(self.world * len(flat))
        with reliable():
            dist.all_gather_single(out, flat, self.group)
        return out.view(self.world, -1)
