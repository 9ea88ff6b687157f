"""An all-gather in place that says which packets came, and repairs those that are asked for.

What keeps replicas together: owners send parameters, a packet that is lost leaves the stale value,
and the receiver counts how often that happened (lossycoll/train/).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from .calls import Operation
from .communicator import Communicator
from .errors import UnsupportedError
from .routes import Routes
from .tensors import address, nbytes
from .work import EngineWork

_c10d: Any = c10d


class BlockWork(EngineWork):
    """``arrived``: bool (world, blocks) once it is done; own row True, a lost rank's False."""

    def __init__(self, communicator: Communicator, operation: Operation, result: Tensor) -> None:
        super().__init__(communicator, operation, [result])
        blocks = operation.blocks
        self._arrived = np.ones((communicator.world, 0), bool) if blocks is None else blocks.arrived

    @property
    def arrived(self) -> NDArray[np.bool_]:
        self.wait()
        return self._arrived


class BlockGather:
    """The calls of one group."""

    def __init__(self, routes: Routes, communicator: Communicator) -> None:
        self._routes = routes
        self._comm = communicator

    def all_gather(self, output: Tensor, needed: NDArray[np.bool_] | None) -> BlockWork:
        routes, world, name = self._routes, self._comm.world, "all_gather_blocks"
        if output.dim() != 1 or not output.is_contiguous() or output.numel() % world:
            raise UnsupportedError(
                f"{self._comm.health.where}: {name} got a tensor of shape {tuple(output.shape)} "
                f"and stride {output.stride()}, wanted one dimension, contiguous, its length a "
                f"multiple of {world}"
            )
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
