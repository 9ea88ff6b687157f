"""Collectives whose callers know what became of each packet (lossycoll/train/).

An all-gather in place that says which packets came, and repairs those that are asked for: owners
send parameters, a packet that is lost leaves the stale value, and the receiver counts how often
that happened. And a reduce-scatter that says which contributions were lost, so that they can be
sent again with the next.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lossycoll.errors import UnsupportedError
from lossycoll.runtime.collectives.endpoint import Communicator
from lossycoll.runtime.core.call import Operation
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions

from .dispatch import Routes
from .tensors import AVG, DTYPES, address, nbytes
from .work import EngineWork

_c10d: Any = c10d


class BlockWork(EngineWork):
    """``arrived``: bool (world, blocks) once it is done; own row True, a lost rank's False."""

    def __init__(self, communicator: Communicator, operation: Operation, result: Tensor) -> None:
        super().__init__(communicator, operation, [result])
        blocks, nothing = operation.blocks, np.ones((communicator.world, 0), np.bool_)
        self._arrived = blocks.arrived if isinstance(blocks, Blocks) else nothing

    @property
    def arrived(self) -> NDArray[np.bool_]:
        self.wait()
        return self._arrived


class ContributionWork(EngineWork):
    """``lost``: bool (world, blocks) once it is done; own row False."""

    def __init__(self, communicator: Communicator, operation: Operation, result: Tensor) -> None:
        super().__init__(communicator, operation, [result])
        blocks, nothing = operation.blocks, np.zeros((communicator.world, 0), np.bool_)
        self._lost = blocks.lost if isinstance(blocks, Contributions) else nothing

    @property
    def lost(self) -> NDArray[np.bool_]:
        self.wait()
        return self._lost


class BlockCalls:
    """The calls of one group."""

    def __init__(self, routes: Routes, communicator: Communicator) -> None:
        self._routes = routes
        self._comm = communicator

    def all_gather(self, output: Tensor, needed: NDArray[np.bool_] | None) -> BlockWork:
        routes, world, name = self._routes, self._comm.world, "all_gather_blocks"
        self._check(name, output)
        chunk = nbytes(output) // world
        shape = (world, self._comm.blocks(chunk))
        if needed is not None and (needed.shape != shape or needed.dtype != np.bool_):
            raise UnsupportedError(
                f"{self._comm.health.where}: {name} got needed blocks as "
                f"{needed.dtype}{needed.shape}, wanted bool{shape}"
            )
        options = routes.effective()
        call = routes.issue(name, [output], output, options=options)
        opts = _c10d.AllgatherOptions()
        if chunk:
            start = address(output)
            operation = routes.operations.all_gather_blocks(
                call,
                (start + self._comm.rank * chunk, start),
                chunk,
                needed,
                routes.terms(options, opts, output),
            )
        else:
            operation = routes.barrier(call, opts)
        work = BlockWork(self._comm, operation, output)
        routes.noted(work)
        return work

    def reduce_scatter(self, output: Tensor, input: Tensor) -> ContributionWork:
        routes, name = self._routes, "reduce_scatter_blocks"
        self._check(name, input)
        routes.check_chunks(name, output, input)
        if not output.is_contiguous():
            raise routes.refusal(name, f"an output of stride {output.stride()} in")
        reduction = routes.reduction(name, input.dtype, SimpleNamespace(op=AVG, factor=None))
        options = routes.effective()
        if not reduction.native:
            raise routes.refusal(name, f"{input.dtype} in")
        call = routes.issue(name, [output, input], input, options=options)
        opts = _c10d.ReduceScatterOptions()
        if output.numel():
            operation = routes.operations.reduce_scatter_blocks(
                call,
                (address(input), address(output)),
                output.numel(),
                DTYPES[input.dtype],
                routes.terms(options, opts, (output, input)),
            )
        else:
            operation = routes.barrier(call, opts)
        work = ContributionWork(self._comm, operation, output)
        routes.noted(work)
        return work

    def _check(self, name: str, whole: Tensor) -> None:
        """``whole`` must have a chunk for each rank, one after another in memory."""
        world = self._comm.world
        if whole.dim() != 1 or not whole.is_contiguous() or whole.numel() % world:
            raise UnsupportedError(
                f"{self._comm.health.where}: {name} got a tensor of shape {tuple(whole.shape)} "
                f"and stride {whole.stride()}, wanted one dimension, contiguous, its length a "
                f"multiple of {world}"
            )
