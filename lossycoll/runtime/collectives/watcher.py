"""The thread that completes what only a future waits for, and asks about calls that take long."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Final

from lossycoll.errors import ClosedError, EngineError
from lossycoll.runtime.core.call import Collective, LongWait, Operation

from .operations import Operations
from .parts import Parts

SLICE: Final = 0.1
"""Longest stay in the engine, in seconds."""


class Watcher:
    """One group's. The thread starts with the first call that needs it.

    Args:
        parts: The rank's parts of the group.
        operations: Those that it completes.
    """

    def __init__(self, parts: Parts, operations: Operations) -> None:
        self._health = parts.health
        self._engine = parts.engine
        self._operations = operations
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._long_waits: dict[int, LongWait] = {}
        self._asked_for: dict[int, Operation] = {}
        """By their tickets: messages are among them."""

    def watch(self, call: Collective) -> None:
        """Asks the other ranks about ``call`` from time to time until ``unwatch(call)``."""
        self._long_waits[call.seq] = self._health.long_wait(call, time.monotonic())
        self._start()

    def unwatch(self, call: Collective) -> None:
        """Ends :meth:`watch`."""
        self._long_waits.pop(call.seq, None)

    def complete(self, operation: Operation) -> None:
        """Completes ``operation`` when it ends, whether anybody waits or not."""
        engine = self._engine
        assert engine is not None
        self._start()

        def ask(ticket: int) -> None:
            self._asked_for[ticket] = operation
            engine.notify(ticket)

        with contextlib.suppress(ClosedError):  # closing completes it
            operation.be_handed_over(ask)

    def join(self) -> None:
        """Ends the thread; the group was closed before, so that no other one starts."""
        with self._lock:  # who has seen the group open has started it by now
            thread = self._thread
        if self._engine is not None and thread is not None:
            self._engine.stop_next()
            if threading.current_thread() is not thread:
                thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None and self._engine is not None and not self._health.closed:
                self._thread = threading.Thread(
                    target=self._run, name="lossycoll-complete", daemon=True
                )
                self._operations.notify_futures()
                self._thread.start()

    def _run(self) -> None:
        try:
            self._complete_all()
        except Exception as error:  # else whoever waits for a future would wait for ever
            text = f"{self._health.where}: the thread that completes futures failed: {error!r}"
            self._health.fail(EngineError(text), tell=True)
            raise

    def _complete_all(self) -> None:
        assert self._engine is not None
        while True:
            ticket = self._engine.next(SLICE)
            if ticket < 0:
                return
            if ticket == 0:
                self._ask_about_all(time.monotonic())
            else:
                found = self._asked_for.pop(ticket, None) or self._operations.await_noted(ticket)
                found.handed_over()

    def _ask_about_all(self, now: float) -> None:
        for operation in list(self._operations.unfinished.values()):
            operation.ask_if_due(now)
        for wait in list(self._long_waits.values()):
            wait.ask_if_due(now)
