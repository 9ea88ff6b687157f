"""The thread that waits for calls on devices to end, and gives their memory back.

It also has operations noted as done, or as failed, for which nobody waits. It ends when it has had
nothing to do for a while.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

from lossycoll.runtime.core.call import Operation
from lossycoll.runtime.core.logfmt import log

from .bounce import Bounce

IDLE_SECONDS: Final = 0.5
SWEEP_SECONDS: Final = 0.002

Entry = tuple[Bounce, "Operation | None"]


class Retirement:
    """One device's calls, in the order in which they were made.

    The thread looks every now and then: were it woken by every call, it would take the GIL from the
    caller each time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque()
        self._thread: threading.Thread | None = None

    def add(self, bounce: Bounce, operation: Operation | None) -> None:
        """Waits for the end of a call.

        Args:
            bounce: Its way.
            operation: Its operation; None if it wasn't submitted.
        """
        with self._lock:
            self._entries.append((bounce, operation))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="lossycoll-device", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        pending: list[Entry] = []
        idle_since = time.monotonic()
        while True:
            time.sleep(SWEEP_SECONDS)
            with self._lock:
                pending += self._entries
                self._entries.clear()
                if pending:
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > IDLE_SECONDS:
                    self._thread = None
                    return
            pending = _rest(pending)


def _rest(pending: list[Entry]) -> list[Entry]:
    """Ends what is over; returns the rest. In a lane nothing is over before what comes first."""
    rest: list[Entry] = []
    stopped: set[int] = set()
    for bounce, operation in pending:
        if id(bounce.lane) not in stopped and _ended(bounce, operation):
            continue
        rest.append((bounce, operation))
        if bounce.in_order:
            stopped.add(id(bounce.lane))
    return rest


def _ended(bounce: Bounce, operation: Operation | None) -> bool:
    """Whether the call is over; its memory is given back then."""
    try:
        if not bounce.is_over(operation):
            return False
        bounce.release()
    except RuntimeError as error:  # the device's: its memory is never used again
        log.error("%s: a copy between host and device failed: %s", bounce.layer.name, error)
    return True
