"""The way of one call: device, host memory, operation, host memory, device.

The operation is submitted at once, so that calls have the same order on all ranks, and a gate holds
it back until its input has been copied. Where streams can wait for a word of memory, the way back
is queued at once as well: no thread of the host has to be there when the operation ends. Elsewhere
it is queued when the operation ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
        reads: Whether ``source`` is read; False: its copy begins as anything.
        keeps: Whether elements of ``target`` may stay as they are.
        in_order: Whether calls in the lane end in their order.
        may_be_ahead: Whether the way back may be queued before the operation ended.
        returns_source: Whether ``source`` is written as well.
        epilogue: Brings what came from ``target`` to where it belongs, on the device; or None.
        among: The same, which gets the ranks that took part; or None.

    Raises:
        DeviceError: There is no host memory that the device reaches.

    Attributes:
        source: ``source`` in host memory, shape (elements,).
        target: The same of ``target``; the same tensor if they are.
        gate: Address of the gate.
        ahead: Whether the way back was queued before the operation ended.
        lane: The streams.
        in_order: Whether calls in the lane end in their order.
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
        reads: bool = True,
        keeps: bool = False,
        returns_source: bool = False,
        in_order: bool = True,
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
        self.in_order: Final = in_order
        self.ahead: Final = layer.waits_by_stream and may_be_ahead and among is None
        self.source = self._mirror(source)
        self.target = self.source if target is source else self._mirror(target)
        fills = [(self.source, source)] if reads else []
        back = [(self.target, target)]
        if target is not source:
            if keeps:
                fills.append((self.target, target))
            if returns_source:
                back.insert(0, (self.source, source))
        self._back = back
        self.gate: Final = self._take(gates.GATE_BYTES).data_ptr()
        self._fill(fills)

    def _take(self, nbytes: int) -> Tensor:
        piece = self._pool.take(nbytes)
        self._pieces.append(piece)
        return piece

    def _mirror(self, tensor: Tensor) -> Tensor:
        nbytes = tensor.numel() * tensor.element_size()
        return self._take(nbytes)[:nbytes].view(tensor.dtype)

    def _fill(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copies to the host, after what the caller has queued."""

        stream = self.lane.to_host
        stream.wait_for(self.layer.current().record())
        for mirror, tensor in pairs:
            stream.copy(mirror, tensor)
        self._copied = stream.record()

    def shut(self, wakers: gates.Wakers) -> None:
        """Makes the gate; before the operation is submitted.

        Args:
            wakers: Those of the operation's host.
        """
        self._wakers = wakers  # its descriptors must not be closed before the gate is opened
        gates.shut(self.gate, wakers)

    def open(self) -> None:
        """Lets the operation, which was submitted, start once its input is there."""
        to_host, to_device = self.lane
        if not self.is_opened:
            to_host.call(gates.OPENER, self.gate)
            self.is_opened = True
        self._opened = to_host.record()
        if self.ahead:
            to_device.wait_for(self._copied)
            to_device.wait_for_word(gates.done_word(self.gate))
            self._come_back(self._epilogue)

    def finish(self, members: Sequence[int]) -> None:
        """Queues the way back of an operation that has ended well; unless ``ahead``.

        Args:
            members: The ranks that took part.
        """
        among = self._among
        self.lane.to_device.wait_for(self._copied)
        self._come_back(self._epilogue if among is None else lambda: among(members))

    def _come_back(self, then: Callable[[], None] | None) -> None:
        stream = self.lane.to_device
        for mirror, tensor in self._back:
            stream.copy(tensor, mirror)
        if then is not None:
            stream.run(then)
        self.end = stream.record()

    def order_current(self) -> None:
        """What the caller queues from now on comes after the result."""
        if self.end is not None:
            self.layer.current().wait_for(self.end)

    def wait_until_copied(self) -> None:
        """Waits until the copy to the host is done, for what can't be gated."""
        self._copied.wait()

    def is_over(self, operation: Operation | None) -> bool:
        """Whether nothing of the call is under way.

        Args:
            operation: The call's; None if it wasn't submitted.
        """
        if operation is not None and not operation.done:
            # Where nothing is written yet, nothing has ended: to ask the engine costs more.
            if (self._opened is None or gates.is_done(self.gate)) and operation.poll():
                return self.is_over(None)
            operation.ask_if_due(time.monotonic())  # nobody else may wait for it
            return False
        return all(event.is_done() for event in self._places())

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
