"""The way of one call: device, host memory, operation, host memory, device.

The operation is submitted at once, so that calls have the same order on all ranks, and a gate holds
it back until its input has been copied. Where streams can wait for a word of memory, the way back
is queued at once as well: no thread of the host has to be there when the operation ends. Elsewhere
it is queued when the operation ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from torch import Tensor

from lossycoll.runtime.core.call import Operation
from lossycoll.runtime.engine import gates

from .host_memory import HostMemory
from .layer import Lane, Layer

Among = Callable[[Sequence[int]], None]


class Bounce:
    """One call's.

    Args:
        layer: The device.
        lane: The group's streams there.
        pool: The device's host memory.
        source: What is read; contiguous, on the device.
        target: What is written; contiguous, on the device. May be ``source``.
        wakers: Those of the host whose operation waits behind a gate; None: it has no gate.
        reads: Whether ``source`` is read; False: its copy begins as anything.
        keeps: Whether elements of ``target`` may stay as they are.
        may_be_ahead: Whether the way back may be queued before the operation ended.
        fills: Whether ``target`` is written.
        returns_source: Whether ``source`` is written as well.
        spoils: Whether ``target`` becomes NaN if the operation fails.
        epilogue: Brings what came from ``target`` to where it belongs, on the device; or None.
        among: The same, which gets the ranks that took part; or None.

    Raises:
        DeviceError: There is no host memory that the device reaches.

    Attributes:
        source: ``source`` in host memory, shape (elements,).
        target: The same of ``target``; the same tensor if they are.
        gate: Address of the gate; 0: there is none.
        ahead: Whether the way back was queued before the operation ended.
        lane: The streams.
        is_opened: Whether the gate will open.
        end: The place in a stream after which the result is on the device; None before it is known.
    """

    def __init__(
        self,
        layer: Layer,
        lane: Lane,
        pool: HostMemory,
        source: Tensor,
        target: Tensor,
        *,
        wakers: gates.Wakers | None = None,
        reads: bool = True,
        keeps: bool = False,
        fills: bool = True,
        returns_source: bool = False,
        spoils: bool = False,
        may_be_ahead: bool = True,
        epilogue: Callable[[], None] | None = None,
        among: Among | None = None,
    ) -> None:
        self.layer: Final = layer
        self.lane: Final = lane
        self._pool = pool
        self._pieces: list[Tensor] = []
        self._tensors: tuple[Tensor, ...] = (source, target)
        self._epilogue, self._among = epilogue, among
        self._opened: Any = None
        self.is_opened = False
        self._copied: Any = None
        self.end: Any = None
        self.ahead: Final = layer.waits_by_stream and may_be_ahead and among is None
        self.source = self._mirror(source)
        self.target = self.source if target is source else self._mirror(target)
        pairs = [(self.source, source)] if reads else []
        back = [(self.target, target)] if fills else []
        if target is not source:
            if keeps:
                pairs.append((self.target, target))
            if returns_source:
                back.insert(0, (self.source, source))
        self._back = back
        self.gate = 0
        self._wakers = wakers  # its descriptors must not be closed before the gate is opened
        if wakers is not None:
            self.gate = self._take(gates.GATE_BYTES).data_ptr()
            nbytes = self.target.numel() * self.target.element_size()
            gates.shut(self.gate, wakers, (self.target.data_ptr(), nbytes) if spoils else (0, 0))
        self._fill(pairs)

    def _take(self, nbytes: int) -> Tensor:
        piece = self._pool.take(nbytes)
        self._pieces.append(piece)
        return piece

    def _mirror(self, tensor: Tensor) -> Tensor:
        nbytes = tensor.numel() * tensor.element_size()
        return self._take(nbytes)[:nbytes].view(tensor.dtype)

    def _fill(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copies to the host, after what the caller has queued."""
        queued = self.layer.current().record()
        if not pairs:
            self._copied = queued
            return
        stream = self.lane.to_host
        stream.wait_for(queued)
        try:
            for mirror, tensor in pairs:
                stream.copy(mirror, tensor)
        finally:
            self._copied = stream.record()

    def open(self) -> None:
        """Lets the operation, which was submitted, start once its input is there."""
        to_host, to_device = self.lane.to_host, self.lane.to_device
        if not self.is_opened:
            to_host.wait_for(self._copied)
            to_host.call(gates.OPENER, self.gate)
            self.is_opened = True
        self._opened = to_host.record()
        if self.ahead:
            # Once the gate is open, what a failure leaves in host memory is there to stay.
            to_device.wait_for(self._opened)
            to_device.wait_for_word(gates.done_word(self.gate))
            self._come_back(to_device, self._epilogue)

    def finish(self, members: Sequence[int]) -> None:
        """Queues the way back of an operation that has ended well; unless ``ahead``.

        Args:
            members: The ranks that took part.
        """
        among, stream = self._among, self.lane.at_end
        stream.wait_for(self._copied)
        self._come_back(stream, self._epilogue if among is None else lambda: among(members))

    def _come_back(self, stream: Any, then: Callable[[], None] | None) -> None:
        try:
            for mirror, tensor in self._back:
                stream.copy(tensor, mirror)
            if then is not None:
                stream.run(then)
        finally:
            self.end = stream.record()

    def after_end(self) -> AbstractContextManager[None]:
        """What a future is set to inside is ready after the result."""
        return self.layer.after(self.lane, self.end)

    def order_current(self) -> None:
        """What the caller queues from now on comes after the result."""
        if self.end is not None:
            self.layer.current().wait_for(self.end)

    def wait_until_copied(self) -> None:
        """Waits until the copy to the host is done, for what can't be gated."""
        self._copied.wait()

    def is_over(self, operations: Sequence[Operation]) -> bool:
        """Whether nothing of the call is under way.

        Args:
            operations: Those that were submitted for it.
        """
        over = True
        for operation in operations:
            if not operation.done and not self._has_ended(operation):
                operation.ask_if_due(time.monotonic())  # nobody else may wait for it
                over = False
        return over and all(event.is_done() for event in self._places())

    def _has_ended(self, operation: Operation) -> bool:
        # Where nothing is written yet, nothing has ended: to ask the engine costs more.
        gated = self._opened is not None and operation.gated
        return (not gated or gates.is_done(self.gate)) and operation.poll()

    def _places(self) -> list[Any]:
        places = (self._copied, self._opened, self.end)
        return [event for event in places if event is not None]

    @property
    def is_released(self) -> bool:
        """Whether its memory was given back."""
        return not self._pieces

    def release(self) -> None:
        """Gives the memory of a call that is over back."""
        self._back, self._tensors = [], ()
        self._epilogue = self._among = None
        for piece in self._pieces:
            self._pool.give_back(piece)
        self._pieces = []
