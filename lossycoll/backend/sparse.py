"""all_reduce of sparse tensors: all ranks gather all entries, and each adds them up.

Embedding layers have such gradients. How many entries a rank has only that rank knows, so the
numbers are gathered first, and the call waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import PeerLostError, UnsupportedError
from lossycoll.options.fields import Options
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.core.call import Collective, Operation
from lossycoll.runtime.engine.failures import Where

from . import checks
from .description import CollectiveKind, Description, Loss, Staged
from .dispatch import Dispatcher, reliable_version
from .reduction import AVG, INTEGERS, SUM, Reduction, over_ranks, resolve
from .staging import two_buffers
from .tensors import COMPLEX, GLOO_DTYPES, address, contiguous, nbytes, scaled
from .work import EngineWork

KIND: Final = CollectiveKind("all_reduce", Loss.NEVER, two_buffers)
DTYPES: Final = GLOO_DTYPES | {torch.int16, torch.complex64, torch.complex128}
"""What torch can coalesce, and what a sum means something for."""


class SparseAllReduce:
    """The sparse reductions of one group, always reliable.

    Args:
        dispatcher: The group's pipeline.
        endpoint: The group's endpoint.
    """

    def __init__(self, dispatcher: Dispatcher, endpoint: Endpoint) -> None:
        self._dispatcher = dispatcher
        self._endpoint = endpoint
        self._world = endpoint.world
        self._health = endpoint.health
        self._where = endpoint.health.where

    def run(self, tensor: Tensor, opts: Any) -> dist.Work:
        """Reduces the ranks' ``tensor`` in its place, which is coalesced afterwards.

        Entries of one place are added in the order of the ranks, 16-bit floats in float32.

        Args:
            tensor: torch.sparse_coo, on all ranks of one shape and one number of sparse dimensions.
            opts: torch's AllreduceOptions: SUM, AVG, or PREMUL_SUM.

        Raises:
            UnsupportedError: Another reduction, dtype or device.
            PeerLostError: On all ranks, if the group continues without one of them.
        """
        tensor = _whole(self._where, tensor)
        reduction = self.check(tensor, opts)
        sparse, op = tensor.sparse_dim(), opts.reduceOp.op.name
        detail = f"{tensor.dtype}{list(tensor.shape)} of {sparse} sparse dimensions, {op}"
        call = self._dispatcher.named(Description(KIND, [], [], detail=detail))
        try:
            operation = self._submit(call, tensor, reduction, opts)
        except BaseException as error:
            operations = 3 if self._endpoint.options.continues else 2
            self._dispatcher.recover(call, error, operations)
            raise
        return self._dispatcher.coalescing.add(EngineWork(self._endpoint, operation, [tensor]))

    def check(self, tensor: Tensor, opts: Any) -> Reduction:
        """Refuses what can't be served; returns what the call reduces by.

        Args:
            tensor: As in :meth:`run`.
            opts: As in :meth:`run`.

        Raises:
            UnsupportedError: Another reduction, dtype or device.
        """
        tensor = _whole(self._where, tensor)
        dtype, kind = tensor.dtype, opts.reduceOp.op
        checks.check_readable(self._where, KIND.name, [tensor._indices(), tensor._values()])
        reduction = resolve(self._where, KIND.name, dtype, opts.reduceOp)
        if reduction.op not in (SUM, AVG) or dtype not in DTYPES:
            raise UnsupportedError(
                f"{self._where}: all_reduce can't form the {kind.name} of sparse {dtype}; it knows "
                f"SUM, AVG, and for floats PREMUL_SUM, where a place without an entry is zero; "
                f"use .to_dense()"
            )
        return reduction

    def _submit(
        self, call: Collective, tensor: Tensor, reduction: Reduction, opts: Any
    ) -> Operation:
        """Exchanges the numbers of entries, and submits the exchange of the entries."""
        own = tensor.detach().coalesce()
        indices, values = contiguous(own.indices()), scaled(own.values(), reduction.factor)
        options = reliable_version(self._dispatcher.effective())

        self._health.issue(call)
        counts = self._exchange_counts(call, options, opts, len(values))
        source = torch.cat([_bytes(indices), _bytes(values)])
        sizes = tuple(count * _entry_bytes(indices, values) for count in counts)
        target = source.new_empty(sum(sizes))

        def finish() -> None:
            found = [_entries(part, indices, values) for part in torch.split(target, list(sizes))]
            _store(found, reduction, tensor)

        terms = self._dispatcher.terms(options, opts, Staged(source, target, finish))
        buffers = (address(source), address(target))
        return self._dispatcher.collectives.all_gather(call, buffers, sizes, terms)

    def _exchange_counts(
        self, call: Collective, options: Options, opts: Any, entries: int
    ) -> list[int]:
        """Waits for the number of entries of each rank."""
        own = torch.tensor([entries])
        counts = torch.empty(self._world, dtype=torch.int64)
        gathered = self._gather(call, options, opts, own, counts)
        if self._endpoint.options.continues:
            self._all_or_none(call, options, opts, gathered)
        else:
            gathered.wait()
        return [int(count) for count in counts]

    def _gather(
        self, call: Collective, options: Options, opts: Any, own: Tensor, rows: Tensor
    ) -> Operation:
        terms = self._dispatcher.terms(options, opts, Staged(own, rows))
        buffers = (address(own), address(rows))
        return self._dispatcher.collectives.all_gather(call, buffers, nbytes(own), terms)

    def _all_or_none(
        self, call: Collective, options: Options, opts: Any, counted: Operation
    ) -> None:
        """Waits for ``counted``, and raises on all ranks if one lacks a count.

        A rank that dies meanwhile may have sent its count to some and not to others, who couldn't
        take part in what comes next: so the ranks exchange which counts they lack. The failed rank
        itself reaches some at most, and only with the word that it lacks none.
        """
        own = torch.tensor([self._lacks(counted) + 1])
        lacked = torch.zeros(self._world, dtype=torch.int64)
        self._lacks(self._gather(call, options, opts, own, lacked))
        lost = int(lacked.max()) - 1
        if lost >= 0:
            raise PeerLostError(
                f"{self._where}: {call.numbered}: {self._where.peer(lost)} died before all ranks "
                f"knew how many entries it has, so none has the sum; the group continues with the "
                f"survivors, but sparse sums need all ranks: use .to_dense()",
                peer=lost,
            )

    def _lacks(self, operation: Operation) -> int:
        """Waits for it; a rank whose part is missing since that one died, or -1."""
        try:
            operation.wait()
        except PeerLostError as error:
            if self._health.failure is not None or error.peer is None:
                raise
            return error.peer
        return -1


def _whole(where: Where, tensor: Tensor) -> Tensor:
    """The complex tensor itself where torch hands over ``torch.view_as_real`` of it.

    Of a sparse tensor that view is of the old entries: what is stored in it never gets back.
    """
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
        check_invariants=True,
    ).coalesce()
    if reduction.mean:
        values = total.values()
        mean = over_ranks(values, len(found)) if dtype in INTEGERS else values / len(found)
        values.copy_(mean)
    with torch.no_grad():
        tensor.copy_(total.to(dtype))


def _bytes(tensor: Tensor) -> Tensor:
    """Shape (n,), uint8: the elements as they lie in memory."""
    return tensor.reshape(-1).view(torch.uint8)


def _entry_bytes(indices: Tensor, values: Tensor) -> int:
    return len(indices) * indices.itemsize + values.shape[1:].numel() * values.itemsize


def _entries(part: Tensor, indices: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """One rank's indices and values out of its bytes; ``indices`` and ``values`` are alike."""
    count = len(part) // _entry_bytes(indices, values)
    border = count * len(indices) * indices.itemsize
    # The copies begin where their type may begin.
    places = part[:border].clone().view(indices.dtype).view(len(indices), count)
    return places, part[border:].clone().view(values.dtype).view(count, *values.shape[1:])
