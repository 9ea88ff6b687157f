"""torch's calls as data: what each of them reads and writes, and what ranks compare.

One function for each collective. ``where`` says whose call it is; what can't be described is
refused with UnsupportedError, before the call gets its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lossycoll.runtime.engine.failures import Where

from . import checks
from .collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
)
from .description import Description, Splits
from .tensors import nbytes

Tensors = list[Tensor]


def barrier() -> Description:
    """Nothing moves."""
    return Description(BARRIER, [], [], nbytes=1)


# ---- reductions ----


def all_reduce(tensors: Tensors, op: Any) -> Description:
    """``tensors`` is the one of this rank, which was checked."""
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
    """``root`` alone gets the result."""
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
    """``input`` has a chunk for each rank, one after another."""
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
    """``inputs`` has one list with a tensor for each rank."""
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
    """``tensors`` has one, which ``root`` reads and the others write."""
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
    """``output`` has room for a chunk of each rank, one after another."""
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
    """``outputs`` has one list with a tensor for each rank."""
    tensor = checks.only(where, "all_gather", inputs)
    return all_gather_into(where, checks.only(where, "all_gather", outputs), tensor)


def all_gather_into(where: Where, parts: Tensors, tensor: Tensor) -> Description:
    """``parts`` has a tensor for each rank."""
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
    """``outputs`` has one list with a tensor for each rank, at ``root``."""
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
    """``inputs`` has one list with a tensor for each rank, at ``root``."""
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
    """``receive`` and ``send`` are rows for each rank; empty for equal parts."""
    splits = Splits(
        checks.split_bytes(where, "all_to_all", input, send),
        checks.split_bytes(where, "all_to_all", output, receive),
    )
    return _all_to_all(where, [output], [input], splits)


def all_to_all(where: Where, outputs: Tensors, inputs: Tensors) -> Description:
    """Both have a tensor for each rank."""
    for tensors in (outputs, inputs):
        if len(tensors) != where.world:
            raise checks.refusal(where, "all_to_all", f"{len(tensors)} tensors for")
    splits = Splits([nbytes(tensor) for tensor in inputs], [nbytes(tensor) for tensor in outputs])
    return _all_to_all(where, outputs, inputs, splits)


def _all_to_all(where: Where, outputs: Tensors, inputs: Tensors, splits: Splits) -> Description:
    checks.check_own_split(where, "all_to_all", splits.send, splits.receive)
    checks.check_dtypes(where, "all_to_all", [*outputs, *inputs])
    return Description(ALL_TO_ALL, inputs, outputs, detail=str(inputs[0].dtype), splits=splits)
