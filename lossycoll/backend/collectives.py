"""The table of collectives: when each may lose packets, how calls are described and submitted.

Descriptions take what torch's methods take, in their order: lists have a tensor for each rank, at
``root`` alone where there is one. ``submit`` hands a submission to the endpoint. What it hands over
are addresses: the tensors are contiguous by then, and are kept alive until the operation is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from lossycoll.errors import MismatchError
from lossycoll.runtime.core.call import Operation
from lossycoll.runtime.engine.failures import Where

from . import checks
from .description import CollectiveKind, Description, Filled, Loss, Rounding, Splits, Submission
from .staging import one_buffer, two_buffers
from .tensors import DTYPES, address, nbytes

# ---- how the engine does it ----


def _buffers(s: Submission) -> tuple[int, int]:
    return address(s.source), address(s.target)


def _part_bytes(s: Submission) -> int | tuple[int, ...]:
    """The bytes of each rank's part: one number where all are alike."""
    if s.description.sizes is None:
        return nbytes(s.source)
    return tuple(size * s.source.element_size() for size in s.description.sizes)


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
    sizes, own = s.description.sizes, nbytes(s.description.writes[0])
    if sizes is None:
        return s.endpoint.all_to_all(s.call, _buffers(s), own, s.call_options)
    send = [size * s.source.element_size() for size in sizes]
    return s.endpoint.exchange(s.call, _buffers(s), send, [own] * len(sizes), s.call_options)


def _submit_broadcast(s: Submission) -> Operation:
    return s.endpoint.broadcast(
        s.call, s.target.data_ptr(), nbytes(s.target), _root(s), s.call_options
    )


def _submit_all_gather(s: Submission) -> Operation:
    return s.endpoint.all_gather(s.call, _buffers(s), _part_bytes(s), s.call_options)


def _submit_gather(s: Submission) -> Operation:
    return s.endpoint.gather(s.call, _buffers(s), nbytes(s.source), _root(s), s.call_options)


def _submit_scatter(s: Submission) -> Operation:
    part = nbytes(s.description.writes[0])
    return s.endpoint.scatter(s.call, _buffers(s), part, _root(s), s.call_options)


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
    sizes = s.endpoint.all_gather(
        s.call, (sent.data_ptr(), table.data_ptr()), nbytes(sent), call_options
    )
    data = s.endpoint.exchange(s.call, _buffers(s), *splits.in_buffers(), s.call_options)
    return sizes, data


def _submit_all_to_all_even(s: Submission) -> Operation:
    return s.endpoint.all_to_all(
        s.call, _buffers(s), nbytes(s.source) // s.health.where.world, s.call_options
    )


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


Tensors = list[Tensor]


def barrier() -> Description:
    return Description(BARRIER, [], [], nbytes=1)


# ---- reductions ----


def all_reduce(tensors: Tensors, op: Any) -> Description:
    return Description(
        ALL_REDUCE,
        reads=tensors,
        writes=tensors,
        nbytes=nbytes(tensors[0]),
        compared=tensors[0],
        detail=op.op,
        op=op,
    )


def reduce(where: Where, tensors: Tensors, op: Any, root: int) -> Description:
    tensor = checks.only(where, "reduce", tensors)
    return Description(
        REDUCE,
        reads=tensors,
        writes=tensors,
        nbytes=nbytes(tensor),
        compared=tensor,
        detail=f"{op.op.name} to {root}",
        op=op,
        root=root,
    )


def reduce_scatter_single(where: Where, output: Tensor, input: Tensor, op: Any) -> Description:
    checks.check_chunks(where, "reduce_scatter", output, input)
    return Description(
        REDUCE_SCATTER,
        reads=[input],
        writes=[output],
        nbytes=nbytes(input),
        compared=input,
        detail=op.op,
        op=op,
        harmless_overlap=where.rank * nbytes(output),
    )


def reduce_scatter(where: Where, outputs: Tensors, inputs: list[Tensors], op: Any) -> Description:
    output = checks.only(where, "reduce_scatter", outputs)
    parts = checks.only(where, "reduce_scatter", inputs)
    sizes = checks.part_sizes(where, "reduce_scatter", output, parts)
    even = len(set(sizes)) == 1
    return Description(
        REDUCE_SCATTER,
        reads=parts,
        writes=outputs,
        nbytes=sum(sizes) * output.element_size(),
        compared=output if even else None,
        detail=op.op if even else f"{output.dtype} {op.op.name} of {list(sizes)}",
        op=op,
        sizes=None if even else sizes,
    )


# ---- copies ----


def broadcast(where: Where, tensors: Tensors, root: int) -> Description:
    tensor = checks.only(where, "broadcast", tensors)
    return Description(
        BROADCAST,
        reads=tensors,
        writes=tensors,
        nbytes=nbytes(tensor),
        compared=tensor,
        detail=f"from {root}",
        root=root,
    )


def all_gather_single(where: Where, output: Tensor, input: Tensor) -> Description:
    checks.check_chunks(where, "all_gather", input, output)
    return Description(
        ALL_GATHER,
        reads=[input],
        writes=[output],
        nbytes=nbytes(output),
        compared=input,
        harmless_overlap=-where.rank * nbytes(input),
    )


def all_gather(where: Where, outputs: list[Tensors], inputs: Tensors) -> Description:
    tensor = checks.only(where, "all_gather", inputs)
    return all_gather_into(where, checks.only(where, "all_gather", outputs), tensor)


def all_gather_into(where: Where, parts: Tensors, tensor: Tensor) -> Description:
    sizes = checks.part_sizes(where, "all_gather", tensor, parts)
    even = len(set(sizes)) == 1
    return Description(
        ALL_GATHER,
        reads=[tensor],
        writes=parts,
        nbytes=sum(sizes) * tensor.element_size(),
        compared=tensor if even else None,
        detail="" if even else f"{tensor.dtype} {list(sizes)}",
        sizes=None if even else sizes,
    )


def gather(where: Where, outputs: list[Tensors], inputs: Tensors, root: int) -> Description:
    tensor = checks.only(where, "gather", inputs)
    parts = _at_root(where, "gather", outputs, tensor, root)
    return Description(
        GATHER,
        reads=inputs,
        writes=parts,
        nbytes=nbytes(tensor),
        compared=tensor,
        detail=f"to {root}",
        root=root,
    )


def scatter(where: Where, outputs: Tensors, inputs: list[Tensors], root: int) -> Description:
    output = checks.only(where, "scatter", outputs)
    parts = _at_root(where, "scatter", inputs, output, root)
    return Description(
        SCATTER,
        reads=parts,
        writes=outputs,
        nbytes=nbytes(output),
        compared=output,
        detail=f"from {root}",
        root=root,
    )


def _at_root(where: Where, name: str, lists: list[Tensors], tensor: Tensor, root: int) -> Tensors:
    """The root's list of tensors like ``tensor``; what other ranks pass is ignored."""
    if where.rank != root:
        return []
    parts = checks.only(where, name, lists)
    checks.check_list(where, name, tensor, parts)
    return parts


# ---- exchanges ----


def all_to_all_single(
    where: Where, output: Tensor, input: Tensor, receive: Sequence[int], send: Sequence[int]
) -> Description:
    splits = Splits(
        checks.split_bytes(where, "all_to_all", input, send),
        checks.split_bytes(where, "all_to_all", output, receive),
    )
    return _all_to_all(where, [output], [input], splits)


def all_to_all(where: Where, outputs: Tensors, inputs: Tensors) -> Description:
    for tensors in (outputs, inputs):
        if len(tensors) != where.world:
            raise checks.refusal(where, "all_to_all", f"{len(tensors)} tensors for")
    splits = Splits([nbytes(tensor) for tensor in inputs], [nbytes(tensor) for tensor in outputs])
    return _all_to_all(where, outputs, inputs, splits)


def _all_to_all(where: Where, outputs: Tensors, inputs: Tensors, splits: Splits) -> Description:
    checks.check_own_split(where, "all_to_all", splits.send, splits.receive)
    checks.check_dtypes(where, "all_to_all", [*outputs, *inputs])
    return Description(ALL_TO_ALL, inputs, outputs, detail=str(inputs[0].dtype), splits=splits)
