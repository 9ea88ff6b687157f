"""The way of one call: device, host memory, operation, host memory, device.

The operation is submitted at once, so that calls have the same order on all ranks, and a gate holds
it back until its input has been copied. Where streams can wait for a word of memory, the way back
is queued at once as well: no thread of the host has to be there when the operation ends. Elsewhere
it is queued when the operation ends.

A large call whose elements are all alike goes in pieces, each an operation with a gate of its own:
while one is on the network, the next one is copied to the host, and the last one back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor

from lossycoll.runtime.core.call import Operation
from lossycoll.runtime.engine import gates

from .layer import HostMemory, Lane, Layer, StreamOrder

Among = Callable[[Sequence[int]], None]


class Piece(NamedTuple):
    """Buffers of one operation."""

    source: Tensor  # What it reads, in host memory
    target: Tensor  # What it writes, there; may be ``source``
    gate: int  # Address of its gate; 0: there is none


class Bounce(StreamOrder):
    """One call's. First :meth:`fill`; when the operations are submitted, :meth:`come_back`.

    ``wakers``: those of the host whose operations wait behind gates; None: there are no gates.
    ``reads``: whether ``source`` is read; False: its copy begins as anything. ``epilogue``: brings
    what came from ``target`` to where it belongs, on the device; or None. ``among``: the same,
    which gets the ranks that took part; or None. The attributes ``source`` and ``target`` are these
    in host memory, and ``pieces`` is what operations work on, in order.
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
        cuts: Sequence[int] = (),
        reads: bool = True,
        keeps: bool = False,
        fills: bool = True,
        returns_source: bool = False,
        spoils: bool = False,
        may_be_ahead: bool = True,
        epilogue: Callable[[], None] | None = None,
        among: Among | None = None,
    ) -> None:
        ahead = layer.waits_by_stream and may_be_ahead and among is None
        super().__init__(layer, lane, ahead=ahead)
        self._pool = pool
        self._memory: list[Tensor] = []
        self._tensors: tuple[Tensor, ...] = (source, target)
        self._epilogue, self._among = epilogue, among
        self._filled: list[Any] = []
        self._lock = threading.Lock()
        self.is_returning = False
        """Whether all of the way back was queued ahead."""
        self.source = self._mirror(source)
        self.target = self.source if target is source else self._mirror(target)
        there = [(self.source, source)] if reads else []
        back = [(self.target, target)] if fills else []
        if target is not source:
            if keeps:
                there.append((self.target, target))
            if returns_source:
                back.insert(0, (self.source, source))
        self._there, self._back = _cut(there, cuts), _cut(back, cuts)
        self._unfinished = len(cuts) + 1
        self._wakers = wakers  # its descriptors must not be closed before the gates are opened
        self.pieces: Final = self._cut_in_pieces(cuts, spoils)

    def _take(self, nbytes: int) -> Tensor:
        taken = self._pool.take(nbytes)
        self._memory.append(taken)
        return taken

    def _mirror(self, tensor: Tensor) -> Tensor:
        return self._take(tensor.nbytes)[: tensor.nbytes].view(tensor.dtype)

    def _cut_in_pieces(self, cuts: Sequence[int], spoils: bool) -> list[Piece]:
        if self._wakers is None:
            return [Piece(self.source, self.target, 0)]
        n = len(cuts) + 1
        gate = self._take(n * gates.GATE_BYTES).data_ptr()
        whole = [(self.source, self.target)]
        pieces = []
        for ((source, target),) in _cut(whole, cuts):
            spoiled = (target.data_ptr(), target.nbytes) if spoils else (0, 0)
            gates.shut(gate, self._wakers, spoiled)
            pieces.append(Piece(source, target, gate))
            gate += gates.GATE_BYTES
        return pieces

    def fill(self) -> None:
        """Copies to the host, after what the caller has queued, and then opens the gates."""
        stream = self.lane.to_host
        stream.wait_for(self.layer.current().record())
        for pairs, piece in zip(self._there, self.pieces, strict=True):
            try:
                for mirror, tensor in pairs:
                    stream.copy(mirror, tensor)
                if piece.gate:
                    stream.call(gates.OPENER, piece.gate)
            finally:
                self._filled.append(stream.record())

    def come_back(self) -> None:
        """Queues the way back of operations that were submitted, if it is queued ``ahead``."""
        if not self.ahead:
            return
        stream = self.lane.to_device
        try:
            for pairs, piece, filled in zip(self._back, self.pieces, self._filled, strict=True):
                # Once the gate is open, what a failure leaves in host memory is there to stay.
                stream.wait_for(filled)
                stream.wait_for_word(gates.done_word(piece.gate))
                for mirror, tensor in pairs:
                    stream.copy(tensor, mirror)
            if self._epilogue is not None:
                stream.run(self._epilogue)
            self.is_returning = True
        finally:
            self.end = stream.record()

    def finish(self, members: Sequence[int], piece: int = 0) -> None:
        """Queues the way back of an operation that has ended well; unless ``ahead``."""
        among, stream = self._among, self.lane.at_end
        then = self._epilogue if among is None else lambda: among(members)
        with self._lock:  # operations may end in several threads
            self._unfinished -= 1
            stream.wait_for(self._filled[piece])
            try:
                for mirror, tensor in self._back[piece]:
                    stream.copy(tensor, mirror)
                if then is not None and not self._unfinished:
                    stream.run(then)
            finally:
                self.end = stream.record()

    def wait_until_copied(self) -> None:
        """Waits until the copy to the host is done, for what can't be gated."""
        self._filled[-1].wait()

    def is_over(self, operations: Sequence[Operation]) -> bool:
        """True if nothing of the call is under way."""
        over = True
        gate_of = iter(self.pieces)
        for operation in operations:
            gate = next(gate_of).gate if operation.gated else 0
            # Where nothing is written yet, nothing has ended: to ask the engine costs more.
            if operation.done or ((not gate or gates.is_done(gate)) and operation.poll()):
                continue
            operation.ask_if_due(time.monotonic())  # nobody else may wait for it
            over = False
        places = [*self._filled[-1:], *([] if self.end is None else [self.end])]
        return over and all(event.is_done() for event in places)

    def release(self) -> None:
        """Gives the memory of a call that is over back."""
        self._there, self._back, self._tensors = [], [], ()
        self._epilogue = self._among = None
        for taken in self._memory:
            self._pool.give_back(taken)
        self._memory = []


def _cut(
    pairs: list[tuple[Tensor, Tensor]], cuts: Sequence[int]
) -> list[list[tuple[Tensor, Tensor]]]:
    """Cut pairs of contiguous tensors, with as many elements each, into pieces."""
    if not cuts:
        return [pairs]
    parts: list[list[tuple[Tensor, Tensor]]] = []
    for begin, end in zip((0, *cuts), (*cuts, None), strict=True):
        parts.append([(one.view(-1)[begin:end], other.view(-1)[begin:end]) for one, other in pairs])
    return parts
