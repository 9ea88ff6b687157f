"""A send or a receive: what was asked for, and what became of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol

from lossycoll.errors import LossyError
from lossycoll.runtime.core.call import Collective

NOTHING: Final = memoryview(bytearray())


class Carrier(Protocol):
    """What a transfer needs of the messages it is one of."""

    def wait(self, transfer: Transfer, timeout: float | None) -> None: ...
    def poll(self, transfer: Transfer) -> bool: ...
    def on_done(self, transfer: Transfer, callback: Callable[[], None]) -> None: ...


class Transfer:
    """``memory``: the bytes to send, or to be filled; ``keep`` owns them until it is done.

    ``peer``: the other rank; None as long as a receive from any source has none. ``finish`` runs
    when all has arrived, before the receive counts as done. ``deadline``: of time.monotonic().
    """

    __slots__ = (
        "_bell",
        "_carrier",
        "_finish",
        "_keep",
        "call",
        "callbacks",
        "deadline",
        "done",
        "dtype",
        "elements",
        "error",
        "is_send",
        "memory",
        "peer",
        "tag",
        "timeout",
    )

    def __init__(
        self,
        carrier: Carrier,
        call: Collective,
        memory: memoryview,
        *,
        is_send: bool,
        peer: int | None,
        tag: int,
        keep: object,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._carrier = carrier
        self._keep = keep
        self._finish = finish
        self._bell: threading.Event | None = None
        self.call = call
        self.memory = memory
        self.is_send = is_send
        self.peer = peer
        self.tag = tag
        self.dtype = str(call.dtype).removeprefix("torch.")
        self.elements = max(0, call.elements)
        self.deadline = self.timeout = 0.0
        self.done = False
        self.error: LossyError | None = None
        self.callbacks: list[Callable[[], None]] = []

    @property
    def bell(self) -> threading.Event:
        """Rings when it is done, for threads that wait while another one moves the messages."""
        if self._bell is None:
            self._bell = threading.Event()
        return self._bell

    def wait(self, timeout: float | None = None) -> None:
        """Returns when done; raises its error, or OperationTimeout after ``timeout`` seconds.

        After a timeout the transfer goes on, and its memory still belongs to it.
        """
        if not self.done:
            self._carrier.wait(self, timeout)
        if self.error is not None:
            raise self.error.again(self.call.numbered)

    def poll(self) -> bool:
        """Whether it is done."""
        return self.done or self._carrier.poll(self)

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` when done: at once, or from the thread that finds it done."""
        self._carrier.on_done(self, callback)

    def end(self, error: LossyError | None) -> list[Callable[[], None]]:
        """It is done, well or with ``error``: lets go of the memory. Returns whom to call."""
        if error is None and self._finish is not None:
            self._finish()
        self.error = error
        self._keep = self._finish = None
        self.memory = NOTHING
        self.done = True
        if self._bell is not None:
            self._bell.set()
        callbacks, self.callbacks = self.callbacks, []
        return callbacks
