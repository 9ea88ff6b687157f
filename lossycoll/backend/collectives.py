"""The table of collectives: when each may lose packets, and how its calls are submitted.

``submit`` hands a submission to the endpoint. What it hands over are addresses: the tensors are
contiguous by then, and are kept alive until the operation is done.
"""

from __future__ import annotations

from typing import Final

import torch

from lossycoll.errors import MismatchError
from lossycoll.runtime.collectives.endpoint import UNEVEN
from lossycoll.runtime.core.call import Operation

from .description import CollectiveKind, Filled, Loss, Rounding, Submission
from .staging import one_buffer, two_buffers
from .tensors import DTYPES, address

# ---- how the engine does it ----


def _buffers(s: Submission) -> tuple[int, int]:
    return address(s.source), address(s.target)


def _root(s: Submission) -> int:
    assert s.description.root is not None
    return s.description.root


def _submit_all_reduce(s: Submission) -> Operation:
    target = s.target
    return s.endpoint.all_reduce(
        s.call, target.data_ptr(), target.numel(), DTYPES[target.dtype], s.call_options
    )


def _submit_reduce_scatter(s: Submission) -> Operation:
    elements: int | tuple[int, ...] = s.target.numel()
    if s.description.sizes is not None:
        floats = 2 if s.description.writes[0].is_complex() else 1
        elements = tuple(size * floats for size in s.description.sizes)
    return s.endpoint.reduce_scatter(
        s.call, _buffers(s), elements, DTYPES[s.source.dtype], s.call_options
    )


def _gather_chunks(s: Submission) -> Operation:
    """Brings each rank the contributions to its chunk of a reduce-scatter."""
    sizes, own = s.description.sizes, s.description.writes[0].nbytes
    if sizes is None:
        return s.endpoint.copy("all_to_all", s.call, _buffers(s), s.call_options, own)
    send = tuple([size * s.source.element_size() for size in sizes])
    return s.endpoint.copy(UNEVEN, s.call, _buffers(s), s.call_options, send, (own,) * len(sizes))


def _submit_broadcast(s: Submission) -> Operation:
    buffers = s.target.data_ptr(), s.target.data_ptr()
    return s.endpoint.copy(
        "broadcast", s.call, buffers, s.call_options, s.target.nbytes, root=_root(s)
    )


def _submit_all_gather(s: Submission) -> Operation:
    each: int | tuple[int, ...] = s.source.nbytes
    if s.description.sizes is not None:
        each = tuple(size * s.source.element_size() for size in s.description.sizes)
    return s.endpoint.copy("all_gather", s.call, _buffers(s), s.call_options, each)


def _submit_gather(s: Submission) -> Operation:
    return s.endpoint.copy(
        "gather", s.call, _buffers(s), s.call_options, s.source.nbytes, root=_root(s)
    )


def _submit_scatter(s: Submission) -> Operation:
    part = s.description.writes[0].nbytes
    return s.endpoint.copy("scatter", s.call, _buffers(s), s.call_options, part, root=_root(s))


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
    return told, s.endpoint.copy(UNEVEN, s.call, _buffers(s), s.call_options, *sizes)


def _submit_all_to_all_even(s: Submission) -> Operation:
    chunk = s.source.nbytes // s.health.where.world
    return s.endpoint.copy("all_to_all", s.call, _buffers(s), s.call_options, chunk)


def submit_barrier(s: Submission) -> Operation:
    """Submits a barrier, and in its place every call without elements."""
    return s.endpoint.barrier(s.call, s.call_options)


# ---- the table ----

ALL_REDUCE: Final = CollectiveKind(
    "all_reduce",
    Loss.REDUCTION,
    one_buffer,
    submit=_submit_all_reduce,
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
