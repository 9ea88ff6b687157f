"""The table of collectives: when each may lose packets, and how its calls are submitted.

``submit`` hands a submission to the endpoint. What it hands over are addresses: the tensors are
contiguous by then, and are kept alive until the operation is done.

Two collectives, for lossycoll/train/, tell their callers what became of each block (packet). The
all-gather in place says which blocks came, and repairs those that are asked for: owners send
parameters, a block that is lost leaves the stale value, and the receiver counts how often that
happened. The reduce-scatter says which contributions were lost, so that they can be sent again with
the next.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from lossycoll.errors import MismatchError
from lossycoll.runtime.collectives.endpoint import UNEVEN
from lossycoll.runtime.core.call import Operation
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions

from .description import CollectiveKind, Filled, Loss, Rounding, Submission
from .staging import as_they_are, one_buffer, two_buffers
from .tensors import address
from .work import EngineWork

# ---- how the engine does it ----


def _submit_reduce_scatter(s: Submission) -> Operation:
    elements: int | tuple[int, ...] = s.target.numel()
    if sizes := s.description.sizes:
        floats = 2 if s.description.writes[0].is_complex() else 1
        elements = tuple(size * floats for size in sizes)
    return s.endpoint.reduce_scatter(s.call, s.buffers, elements, s.dtype, s.call_options)


def _gather_chunks(s: Submission) -> Operation:
    """Brings each rank the contributions to its chunk of a reduce-scatter."""
    sizes, own = s.description.sizes, s.description.writes[0].nbytes
    if sizes is None:
        return s.endpoint.copy("all_to_all", s.call, s.buffers, s.call_options, own)
    send = tuple([size * s.source.element_size() for size in sizes])
    return s.endpoint.copy(UNEVEN, s.call, s.buffers, s.call_options, send, (own,) * len(sizes))


def _submit_broadcast(s: Submission) -> Operation:
    start, nbytes = s.target.data_ptr(), s.target.nbytes
    return s.endpoint.copy("broadcast", s.call, (start, start), s.call_options, nbytes, root=s.root)


def _part_bytes(s: Submission, even: int) -> int | tuple[int, ...]:
    """Bytes of each rank's part; ``even``: of every part, if all have as many."""
    sizes = s.description.sizes
    return even if sizes is None else tuple([n * s.source.element_size() for n in sizes])


def _submit_all_gather(s: Submission) -> Operation:
    each = _part_bytes(s, s.source.nbytes)
    return s.endpoint.copy("all_gather", s.call, s.buffers, s.call_options, each)


def _submit_gather(s: Submission) -> Operation:
    return s.endpoint.copy(
        "gather", s.call, s.buffers, s.call_options, s.source.nbytes, root=s.root
    )


def _submit_scatter(s: Submission) -> Operation:
    part = s.description.writes[0].nbytes
    return s.endpoint.copy("scatter", s.call, s.buffers, s.call_options, part, root=s.root)


def _submit_all_to_all(s: Submission) -> tuple[Operation, ...]:
    """The data, and before it what each rank sends to each: only the sender knows, so each rank
    compares that with what it expects."""
    splits = s.description.splits
    assert splits is not None
    health, world = s.health, len(splits.send)
    sent = torch.tensor(splits.send, device="cpu")
    table = sent.new_empty((world, world))

    def compare() -> None:
        where = health.where
        for peer, wanted in enumerate(splits.receive):
            theirs = int(table[peer, where.rank])
            if theirs != wanted:
                error = MismatchError(
                    f"{where}: {s.call.numbered}: {where.peer(peer)} sends {theirs} bytes where "
                    f"{wanted} are expected here; make the split sizes of both ranks agree",
                    peer=peer,
                )
                health.fail(error, tell=True)
                raise error

    call_options = s.call_options._replace(
        keep=(sent, table), epilogue=compare, among=None, encoding="same", gate=0, on_device=False
    )
    lengths = sent.data_ptr(), table.data_ptr()
    told = s.endpoint.copy("all_gather", s.call, lengths, call_options, sent.nbytes)
    factor = splits.factor
    sizes = [tuple([factor * n for n in each]) for each in (splits.send, splits.receive)]
    return told, s.endpoint.copy(UNEVEN, s.call, s.buffers, s.call_options, *sizes)


def _submit_all_to_all_even(s: Submission) -> Operation:
    chunk = s.source.nbytes // s.health.where.world
    return s.endpoint.copy("all_to_all", s.call, s.buffers, s.call_options, chunk)


def _submit_all_gather_blocks(s: Submission) -> Operation:
    start, where = address(s.target), s.health.where
    chunks = _part_bytes(s, s.target.nbytes // where.world)
    own = chunks * where.rank if isinstance(chunks, int) else sum(chunks[: where.rank])
    return s.endpoint.all_gather_blocks(
        s.call, (start + own, start), chunks, s.description.argument, s.call_options
    )


def submit_barrier(s: Submission) -> Operation:
    """Submits a barrier, and in its place every call without elements."""
    return s.endpoint.barrier(s.call, s.call_options)


# ---- works that know single blocks ----


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
    def block_bytes(self) -> int:
        """Bytes of ``input`` in one block."""
        blocks = self.operation.blocks
        return (
            blocks.block_bytes if isinstance(blocks, Contributions) else self._endpoint.block_bytes
        )

    @property
    def lost(self) -> NDArray[np.bool_]:
        """The blocks of this rank's contributions that were lost, bool (world, blocks), by owner,
        of ``block_bytes`` each; waits for the work. This rank's own row is False."""
        self.wait_on_host()
        blocks, none = self.operation.blocks, np.zeros((self._endpoint.world, 0), np.bool_)
        return blocks.lost if isinstance(blocks, Contributions) else none


# ---- the table ----

ALL_REDUCE: Final = CollectiveKind(
    "all_reduce",
    Loss.REDUCTION,
    one_buffer,
    submit=lambda s: s.endpoint.all_reduce(
        s.call, s.target.data_ptr(), s.target.numel(), s.dtype, s.call_options
    ),
    divides=True,
    gathering=_submit_all_gather,
    rounding=Rounding.GROUP,
)
REDUCE: Final = CollectiveKind(
    # Only the root has the result, so nothing could be made of what it lacks.
    "reduce",
    Loss.NEVER,
    one_buffer,
    gathering=_submit_gather,
    rounding=Rounding.GROUP,
    filled=Filled.ROOT,
)
REDUCE_SCATTER: Final = CollectiveKind(
    "reduce_scatter",
    Loss.REDUCTION,
    two_buffers,
    submit=_submit_reduce_scatter,
    gathering=_gather_chunks,
    rounding=Rounding.GROUP,
)
BROADCAST: Final = CollectiveKind(
    "broadcast",
    Loss.COPY,
    one_buffer,
    submit=_submit_broadcast,
    divides=True,
    rounding=Rounding.SCOPE,
    filled=Filled.OTHERS,
)
ALL_GATHER: Final = CollectiveKind(
    "all_gather",
    Loss.COPY,
    two_buffers,
    submit=_submit_all_gather,
    rounding=Rounding.GROUP,
)
GATHER: Final = CollectiveKind(
    "gather",
    Loss.NEVER,
    two_buffers,
    submit=_submit_gather,
    rounding=Rounding.GROUP,
    filled=Filled.ROOT,
)
SCATTER: Final = CollectiveKind(
    "scatter",
    Loss.NEVER,
    two_buffers,
    submit=_submit_scatter,
    rounding=Rounding.SCOPE,
)
ALL_TO_ALL: Final = CollectiveKind(
    # Ranks don't know each other's sizes: encoded only where a scope says so, at any size.
    "all_to_all",
    Loss.NEVER,
    two_buffers,
    submit=_submit_all_to_all,
    rounding=Rounding.SCOPE,
    empty_is_barrier=False,
    operations=2,
)
ENCODED_EXCHANGE: Final = CollectiveKind(
    # Of bytes that mean something to those alone who call it; all ones mean NaN.
    "all_to_all",
    Loss.NEVER,
    two_buffers,
    submit=_submit_all_to_all_even,
    spoils=True,
)
ENCODED_GATHER: Final = CollectiveKind(
    "all_gather", Loss.NEVER, two_buffers, submit=_submit_all_gather, spoils=True
)
BARRIER: Final = CollectiveKind("barrier", Loss.NEVER, two_buffers, submit=submit_barrier)
ALL_GATHER_BLOCKS: Final = CollectiveKind(
    "all_gather_blocks",
    Loss.DELIVERY,
    as_they_are,
    submit=_submit_all_gather_blocks,
    rounding=Rounding.CALL,
    work=BlockWork,
)
REDUCE_SCATTER_BLOCKS: Final = CollectiveKind(
    "reduce_scatter_blocks",
    Loss.DELIVERY,
    as_they_are,
    submit=lambda s: s.endpoint.reduce_scatter_blocks(
        s.call, s.buffers, s.target.numel(), s.dtype, s.call_options
    ),
    rounding=Rounding.CALL,
    work=ContributionWork,
    writes_source=True,
)
