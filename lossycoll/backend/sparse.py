"""all_reduce of sparse tensors: all ranks gather all entries, and each adds them up.

Embedding layers have such gradients. How many entries a rank has only that rank knows, so the
numbers are gathered first, and the call waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from lossycoll.devices.registry import device_of, is_served
from lossycoll.errors import PeerLostError, UnsupportedError
from lossycoll.runtime.core.call import Operation
from lossycoll.runtime.engine.failures import Where

from . import checks
from .description import CollectiveKind, Description, Loss, Staged, Submission
from .reduction import AVG, INTEGERS, SUM, Reduction, over_ranks, resolve
from .tensors import COMPLEX, address, contiguous, scaled
from .tensors import DTYPES as FLOATS

DTYPES: Final = frozenset(
    {*FLOATS, torch.complex64, torch.complex128}
    | {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64}
)
"""Dtypes that torch can coalesce, and whose sums have a meaning."""


class SparseSum(NamedTuple):
    """Argument of a description."""

    tensor: Tensor  # torch.sparse_coo; it is filled, and coalesced afterwards
    reduction: Reduction  # SUM or AVG, maybe with a factor

    @property
    def entry_bytes(self) -> int:
        sparse = self.tensor.sparse_dim()
        dense = self.tensor.shape[sparse:].numel() * self.tensor.itemsize
        return sparse * torch.int64.itemsize + dense

    def entries(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """One rank's indices and values out of its bytes."""
        sparse, count = self.tensor.sparse_dim(), len(part) // self.entry_bytes
        border = count * sparse * torch.int64.itemsize
        # The copies begin where their type may begin.
        places = part[:border].clone().view(torch.int64).view(sparse, count)
        values = part[border:].clone().view(self.tensor.dtype)
        return places, values.view(count, *self.tensor.shape[sparse:])


def describe(where: Where, tensor: Tensor, op: Any, *, continues: bool) -> Description:
    """A reliable call that adds up entries of one place in the order of the ranks."""
    kind = WITH_SURVIVORS if continues else ALL_REDUCE_SPARSE
    tensor = _whole(where, tensor)
    parts = [tensor._indices(), tensor._values()]
    checks.check_readable(where, kind.name, parts)
    reduction = resolve(where, kind.name, tensor.dtype, op)
    if reduction.op not in (SUM, AVG) or tensor.dtype not in DTYPES:
        raise UnsupportedError(
            f"{where}: all_reduce can't form the {op.op.name} of sparse {tensor.dtype}; it knows "
            f"SUM, AVG, and for floats PREMUL_SUM, where a place without an entry is zero; "
            f"use .to_dense()"
        )
    sparse, name = tensor.sparse_dim(), op.op.name
    detail = f"{tensor.dtype}{list(tensor.shape)} of {sparse} sparse dimensions, {name}"
    call = SparseSum(tensor, reduction)
    return Description(kind, parts, [], detail=detail, argument=call, result=[tensor])


def _stage(call: Description, reduction: Reduction | None, keep: bool) -> Staged:
    """This rank's entries as bytes, all indices before all values."""
    del reduction, keep
    mine: SparseSum = call.argument
    own = mine.tensor.detach().coalesce().cpu()
    indices, values = contiguous(own.indices()), scaled(own.values(), mine.reduction.factor)
    source = torch.cat([one.reshape(-1).view(torch.uint8) for one in (indices, values)])
    return Staged(source, source)


def _submit(s: Submission) -> Operation:
    """Exchanges the numbers of entries, and submits the exchange of the entries."""
    call: SparseSum = s.description.argument
    counts = torch.empty(s.health.where.world, dtype=torch.int64, device="cpu")
    entries = s.source.nbytes // call.entry_bytes
    gathered = _gather(s, torch.tensor([entries], device="cpu"), counts)
    if s.call_options.options.continues:
        _all_or_none(s, gathered)
    else:
        gathered.wait()
    sizes = tuple(int(count) * call.entry_bytes for count in counts)
    target = s.source.new_empty(sum(sizes))

    def finish() -> None:
        found = [call.entries(part) for part in torch.split(target, list(sizes))]
        _store(found, call.reduction, call.tensor)

    call_options = s.call_options._replace(keep=(s.source, target), epilogue=finish)
    buffers = address(s.source), address(target)
    return s.endpoint.copy("all_gather", s.call, buffers, call_options, sizes)


def _gather(s: Submission, own: Tensor, rows: Tensor) -> Operation:
    call_options = s.call_options._replace(keep=(own, rows))
    buffers = address(own), address(rows)
    return s.endpoint.copy("all_gather", s.call, buffers, call_options, own.nbytes)


def _all_or_none(s: Submission, counted: Operation) -> None:
    """Waits for ``counted``, and raises on all ranks if one lacks a count.

    A rank that dies meanwhile may have sent its count to some and not to others, who couldn't
    take part in what comes next: so the ranks exchange which counts they lack. The failed rank
    itself reaches some at most, and only with the word that it lacks none.
    """
    where = s.health.where
    lacked = torch.zeros(where.world, dtype=torch.int64, device="cpu")
    own = torch.tensor([_lacks(s, counted) + 1], device="cpu")
    _lacks(s, _gather(s, own, lacked))
    lost = int(lacked.max()) - 1
    if lost >= 0:
        raise PeerLostError(
            f"{where}: {s.call.numbered}: {where.peer(lost)} died before all ranks "
            f"knew how many entries it has, so none has the sum; the group continues with the "
            f"survivors, but sparse sums need all ranks: use .to_dense()",
            peer=lost,
        )


def _lacks(s: Submission, operation: Operation) -> int:
    """Waits for it; a rank whose part is missing since that one died, or -1."""
    try:
        operation.wait()
    except PeerLostError as error:
        if s.health.failure is not None or error.peer is None:
            raise
        return error.peer
    return -1


ALL_REDUCE_SPARSE: Final = CollectiveKind(
    "all_reduce", Loss.NEVER, _stage, _submit, empty_is_barrier=False, operations=2
)
WITH_SURVIVORS: Final = replace(ALL_REDUCE_SPARSE, operations=3)
"""The same where a rank may be lost meanwhile, which the third operation tells all others."""


def _whole(where: Where, tensor: Tensor) -> Tensor:
    """The complex tensor itself where torch hands over ``torch.view_as_real`` of it. Of a sparse
    tensor that view is of the old entries: what is stored in it never gets back."""
    base = tensor._base
    if base is not None and base.dtype in COMPLEX and (*base.shape, 2) == tensor.shape:
        return base
    if tensor.is_inference() and tensor.dense_dim() and tensor.shape[-1] == 2:
        raise UnsupportedError(
            f"{where}: all_reduce got a sparse {tensor.dtype}{list(tensor.shape)} in inference "
            f"mode, which may be a complex tensor that could not be filled; use .to_dense(), or "
            f"torch.no_grad() in place of torch.inference_mode()"
        )
    return tensor


def _store(found: Sequence[tuple[Tensor, Tensor]], reduction: Reduction, tensor: Tensor) -> None:
    """Adds up what all ranks have ``found``, (indices, values) of each, in ``tensor``."""
    dtype = tensor.dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = torch.sparse_coo_tensor(
        torch.cat([places for places, _ in found], dim=1),
        torch.cat([entries for _, entries in found]).to(wide),
        tensor.shape,
        device="cpu",  # what came over the network
        check_invariants=True,
    ).coalesce()
    if reduction.mean:
        values = total.values()
        mean = over_ranks(values, len(found)) if dtype in INTEGERS else values / len(found)
        values.copy_(mean)
    with torch.no_grad():
        tensor.copy_(total.to(dtype))
    if is_served(tensor):  # in whatever thread and stream: whoever waits then finds it there
        device_of(tensor).layer.current().record().wait()
