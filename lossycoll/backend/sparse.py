"""all_reduce of sparse tensors: all ranks gather all entries, and each adds them up.

Embedding layers have such gradients. How many entries a rank has only that rank knows, so the
numbers are gathered first, and the call waits for them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from lossycoll.errors import PeerLostError, UnsupportedError
from lossycoll.runtime.collectives.endpoint import Communicator
from lossycoll.runtime.core.call import Collective, Operation, Terms

from .dispatch import Routes, reliable_version
from .tensors import AVG, GLOO_DTYPES, SUM, address, contiguous, nbytes, scaled

_DTYPES: Final = GLOO_DTYPES | {torch.int16, torch.complex64, torch.complex128}
"""What torch can coalesce, and what a sum means something for."""


class Sparse:
    """The sparse calls of one group, always reliable. ``opts`` are torch's options of the call."""

    def __init__(self, routes: Routes, communicator: Communicator) -> None:
        self._routes = routes
        self._world = communicator.world
        self._health = communicator.health
        self._where = communicator.health.where
        self._outlives = communicator.options.outlives

    def all_reduce(self, tensor: Tensor, opts: Any) -> dist.Work:
        """The sum (or mean) of the ranks' ``tensor`` (torch.sparse_coo, all of one shape and one
        number of sparse dimensions), in its place and coalesced.

        Entries of one place are added in the order of the ranks, 16-bit floats in float32. Raises
        PeerLostError, on all ranks, where the group goes on without one.
        """
        dtype, kind = tensor.dtype, opts.reduceOp.op
        reduction = self._routes.reduction("all_reduce", dtype, opts.reduceOp)
        if reduction.op not in (SUM, AVG) or dtype not in _DTYPES:
            raise UnsupportedError(
                f"{self._where}: all_reduce can't form the {kind.name} of sparse {dtype}; it knows "
                f"SUM, and for floats AVG and PREMUL_SUM, where a place without an entry is zero; "
                f"use .to_dense()"
            )
        own = tensor.detach().coalesce()
        indices, values = contiguous(own.indices()), scaled(own.values(), reduction.factor)
        detail = f"{dtype}{list(tensor.shape)} of {len(indices)} sparse dimensions, {kind.name}"
        call = self._routes.issue("all_reduce", [indices, values], detail=detail)
        options = reliable_version(self._routes.effective())
        gather = self._routes.operations.all_gather

        number = torch.tensor([len(values)])
        numbers = torch.empty(self._world, dtype=torch.int64)
        terms = self._routes.terms(options, opts, (number, numbers))
        operation = gather(call, (address(number), address(numbers)), nbytes(number), terms)
        if self._outlives:
            self._all_or_none(call, operation, self._routes.terms(options, opts, None))
        else:
            operation.wait()
        counts: list[int] = numbers.tolist()

        source = torch.cat([_bytes(indices), _bytes(values)])
        sizes = tuple(count * _entry_bytes(indices, values) for count in counts)
        target = source.new_empty(sum(sizes))

        def finish() -> None:
            found = [_entries(part, indices, values) for part in torch.split(target, list(sizes))]
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
            total = torch.sparse_coo_tensor(
                torch.cat([places for places, _ in found], dim=1),
                torch.cat([entries for _, entries in found]).to(wide),
                tensor.shape,
                check_invariants=True,
            ).coalesce()
            if reduction.op == AVG:
                total = total / self._world
            with torch.no_grad():
                tensor.copy_(total.to(dtype))

        terms = self._routes.terms(options, opts, (source, target), finish)
        operation = gather(call, (address(source), address(target)), sizes, terms)
        return self._routes.work(operation, [tensor])

    def _all_or_none(self, call: Collective, counted: Operation, terms: Terms) -> None:
        """Waits for ``counted``. A rank that dies meanwhile may have told some of its count and not
        others, who couldn't take part in what comes next: so all tell each other, and raise if one
        lacks a count. The dead one itself tells some at most, and only that it lacks none.
        """
        lacks = self._lacks(counted)
        own = torch.tensor([lacks + 1])
        all_own = torch.zeros(self._world, dtype=torch.int64)
        gather = self._routes.operations.all_gather
        terms = terms._replace(keep=(own, all_own))
        self._lacks(gather(call, (address(own), address(all_own)), nbytes(own), terms))
        lost = int(all_own.max()) - 1
        if lost >= 0:
            raise PeerLostError(
                f"{self._where}: {call.numbered}: {self._where.peer(lost)} died before all ranks "
                f"knew how many entries it has, so none has the sum; the group goes on without, "
                f"but sparse sums need all ranks: use .to_dense()",
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
