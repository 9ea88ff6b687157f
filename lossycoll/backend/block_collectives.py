"""Collectives whose callers learn what became of each block (packet); lossycoll/train/ uses them.

The all-gather in place says which blocks came, and repairs those that are asked for: owners send
parameters, a block that is lost leaves the stale value, and the receiver counts how often that
happened. The reduce-scatter says which contributions were lost, so that they can be sent again with
the next.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lossycoll.errors import UnsupportedError
from lossycoll.runtime.core.call import Operation
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions

from .description import CollectiveKind, Loss, Rounding, Submission
from .staging import as_they_are
from .tensors import DTYPES, address
from .work import EngineWork


class BlockWork(EngineWork):
    """The work of ``all_gather_blocks``."""

    @property
    def arrived(self) -> NDArray[np.bool_]:
        """The blocks that came, bool (world, blocks), by owner; waits for the work. This rank's own
        row is True, a lost rank's False."""
        self.wait_on_host()
        return self._arrived()

    @property
    def arrived_result(self) -> NDArray[np.bool_]:
        """The same, which waits for the result alone (``wait_result``)."""
        self.wait_result()
        self.operation.wait_result()  # tensors on a device may be ordered behind it until now
        return self._arrived()

    def _arrived(self) -> NDArray[np.bool_]:
        blocks = self.operation.blocks
        nothing = np.ones((self._endpoint.world, 0), np.bool_)
        return blocks.arrived if isinstance(blocks, Blocks) else nothing


class ContributionWork(EngineWork):
    """The work of ``reduce_scatter_blocks``."""

    @property
    def sent(self) -> NDArray[np.bool_]:
        """The owners to whom this rank has sent a contribution over the network, bool (world,)."""
        blocks, none = self.operation.blocks, np.zeros(self._endpoint.world, np.bool_)
        return blocks.sent if isinstance(blocks, Contributions) else none

    @property
    def lost(self) -> NDArray[np.bool_]:
        """The blocks of this rank's contributions that were lost, bool (world, blocks), by owner;
        waits for the work. This rank's own row is False."""
        self.wait_on_host()
        blocks, none = self.operation.blocks, np.zeros((self._endpoint.world, 0), np.bool_)
        return blocks.lost if isinstance(blocks, Contributions) else none


def check_whole(where: Where, name: str, whole: Tensor, encoding: str) -> None:
    """Refuse a ``whole`` that isn't a chunk for each rank in a row, or can't be encoded so."""
    if whole.dim() != 1 or not whole.is_contiguous() or whole.numel() % where.world:
        raise UnsupportedError(
            f"{where}: {name} got a tensor of shape {tuple(whole.shape)} and stride "
            f"{whole.stride()}, wanted one dimension, contiguous, its length a multiple of "
            f"{where.world}"
        )

    if encoding != "same" and whole.dtype is not torch.float32:
        raise UnsupportedError(
            f"{where}: {name} got {whole.dtype} to be sent as {encoding}, wanted torch.float32"
        )


def _all_gather(s: Submission) -> Operation:
    start, where = address(s.target), s.health.where
    chunk = s.target.nbytes // where.world
    buffers = (start + where.rank * chunk, start)
    return s.endpoint.all_gather_blocks(
        s.call, buffers, chunk, s.description.argument, s.call_options
    )


def _reduce_scatter(s: Submission) -> Operation:
    buffers, dtype = (address(s.source), address(s.target)), DTYPES[s.source.dtype]
    return s.endpoint.reduce_scatter_blocks(
        s.call, buffers, s.target.numel(), dtype, s.call_options
    )


ALL_GATHER_BLOCKS: Final = CollectiveKind(
    "all_gather_blocks",
    Loss.DELIVERY,
    as_they_are,
    submit=_all_gather,
    rounding=Rounding.CALL,
    work=BlockWork,
)
REDUCE_SCATTER_BLOCKS: Final = CollectiveKind(
    "reduce_scatter_blocks",
    Loss.DELIVERY,
    as_they_are,
    submit=_reduce_scatter,
    rounding=Rounding.CALL,
    work=ContributionWork,
    writes_source=True,
)
