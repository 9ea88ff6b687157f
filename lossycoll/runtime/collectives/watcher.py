"""The thread that completes what only a future waits for, and asks about calls that take long."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from lossycoll.errors import EngineError
from lossycoll.runtime.core.call import Collective, Operation

from .operations import Operations
from .parts import Parts

SLICE: Final = (0.001, 0.1)
"""Longest stay in the engine, in seconds: while it polls operations of its own, and otherwise."""


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
        self._nudged: dict[int, Callable[[float], None]] = {}
        self._unnotified: deque[Operation] = deque()

    def watch(self, call: Collective, nudge: Callable[[float], None]) -> None:
        """Calls ``nudge(time.monotonic())`` now and then until ``unwatch(call)``."""
        self._nudged[call.seq] = nudge
        self._start()

    def unwatch(self, call: Collective) -> None:
        """Ends :meth:`watch`."""
        self._nudged.pop(call.seq, None)

    def complete(self, operation: Operation) -> None:
        """Completes ``operation`` when it ends, whether anybody waits or not."""
        if not operation.notify:
            self._unnotified.append(operation)
        self._start()

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
        slow: list[Operation] = []
        while True:
            # The engine hands to next() only what was submitted with notify.
            while self._unnotified:
                slow.append(self._unnotified.popleft())
            slow = [operation for operation in slow if not operation.poll(SLICE[0])]
            ticket = self._engine.next(SLICE[0] if slow else SLICE[1])
            if ticket < 0:
                return
            if ticket == 0:
                self._nudge_all(time.monotonic())
            else:
                self._operations.await_noted(ticket).handed_over()

    def _nudge_all(self, now: float) -> None:
        for operation in list(self._operations.unfinished.values()):
            operation.nudge(now)
        for nudge in list(self._nudged.values()):
            nudge(now)
