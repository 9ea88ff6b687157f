"""The operations of a world of one: data is copied, and every operation is done at once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.errors import LossyError
from lossycoll.plan import copies, reduce_scatter
from lossycoll.runtime.core.call import CallOptions, Collective, Operation
from lossycoll.runtime.engine.binding import DType
from lossycoll.runtime.engine.failures import Code, Where
from lossycoll.runtime.engine.packet_masks import Blocks, Contributions
from lossycoll.runtime.world.group_state import Health

from .collective_endpoint import CollectiveEndpoint

PAYLOAD: Final = 1408
"""Bytes that a packet would carry, for those who count blocks."""


class SingleRank(CollectiveEndpoint):
    """Runs collectives without an engine.

    A reduction of one rank's contribution is that contribution.
    """

    def __init__(self, health: Health) -> None:
        self._health = health

    def all_reduce(
        self, call: Collective, address: int, elements: int, dtype: DType, call_options: CallOptions
    ) -> Operation:
        del address, elements, dtype
        return self._done(call, call_options)

    def reduce_scatter(
        self,
        call: Collective,
        buffers: tuple[int, int],
        elements: int | tuple[int, ...],
        dtype: DType,
        call_options: CallOptions,
    ) -> Operation:
        return self._copy(call, buffers, elements, call_options, dtype.itemsize)

    def reduce_scatter_blocks(
        self,
        call: Collective,
        buffers: tuple[int, int],
        elements: int,
        dtype: DType,
        call_options: CallOptions,
    ) -> Operation:
        operation = self._copy(call, buffers, elements, call_options, dtype.itemsize)
        per_packet = PAYLOAD // dtype.itemsize
        operation.blocks = Contributions(reduce_scatter.reduce_scatter(1, 0, elements, per_packet))
        return operation

    def broadcast(
        self, call: Collective, address: int, nbytes: int, root: int, call_options: CallOptions
    ) -> Operation:
        del address, nbytes, root
        return self._done(call, call_options)

    def all_gather(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int | tuple[int, ...],
        call_options: CallOptions,
    ) -> Operation:
        return self._copy(call, buffers, nbytes, call_options)

    def all_gather_blocks(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int,
        needed: NDArray[np.bool_] | None,
        call_options: CallOptions,
    ) -> Operation:
        del needed
        operation = self._copy(call, buffers, nbytes, call_options)
        operation.blocks = Blocks(copies.all_gather(1, 0, nbytes, PAYLOAD))
        return operation

    def all_to_all(
        self, call: Collective, buffers: tuple[int, int], nbytes: int, call_options: CallOptions
    ) -> Operation:
        return self._copy(call, buffers, nbytes, call_options)

    def exchange(
        self,
        call: Collective,
        buffers: tuple[int, int],
        send: Sequence[int],
        receive: Sequence[int],
        call_options: CallOptions,
    ) -> Operation:
        del receive
        return self._copy(call, buffers, send[0], call_options)

    def gather(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int,
        root: int,
        call_options: CallOptions,
    ) -> Operation:
        del root
        return self._copy(call, buffers, nbytes, call_options)

    def scatter(
        self,
        call: Collective,
        buffers: tuple[int, int],
        nbytes: int,
        root: int,
        call_options: CallOptions,
    ) -> Operation:
        del root
        return self._copy(call, buffers, nbytes, call_options)

    def barrier(self, call: Collective, call_options: CallOptions) -> Operation:
        return self._done(call, call_options)

    def _copy(
        self,
        call: Collective,
        buffers: tuple[int, int],
        count: int | tuple[int, ...],
        call_options: CallOptions,
        itemsize: int = 1,
    ) -> Operation:
        source, target = buffers
        if call_options.on_device:
            return self._done(call, call_options)
        own = count if isinstance(count, int) else count[0]
        ctypes.memmove(target, source, own * itemsize)
        return self._done(call, call_options)

    def _done(self, call: Collective, call_options: CallOptions) -> Operation:
        operation = Operation(self, call, call_options, 0.0)
        operation.complete()
        return operation

    # ---- what an operation asks for (core/call.py's Submitter) ----

    def wait_ticket(self, ticket: int, seconds: float) -> int:
        del ticket, seconds
        return Code.OK

    def wait_result(self, operation: Operation, seconds: float) -> int:
        del operation, seconds
        return Code.OK

    def take(self, operation: Operation) -> LossyError | None:
        del operation
        return None

    def release(self, operation: Operation) -> None:
        pass

    def note_waiting(self, call: Collective) -> None:
        pass

    def where(self, operation: Operation | None = None) -> Where:
        del operation
        return self._health.where
