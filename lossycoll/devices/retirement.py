"""The thread that waits for calls on devices to end, and gives their memory back.

It also has operations noted as done, or as failed, for which nobody waits. It ends when it has had
nothing to do for a while.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Final

from lossycoll.runtime.core.call import Operation
from lossycoll.runtime.core.logfmt import log

from .bounce import Bounce

IDLE_SECONDS: Final = 0.5
SWEEP_SECONDS: Final = 0.02
"""How long the oldest call is waited for before the others are looked at."""

Entry = tuple[Bounce, "Operation | None"]


class Retirement:
    """One device's calls, in the order in which they were made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, bounce: Bounce, operation: Operation | None) -> None:
        """Waits for the end of a call.

        Args:
            bounce: Its way.
            operation: Its operation; None if it wasn't submitted.
        """
        with self._lock:
            self._entries.put((bounce, operation))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="lossycoll-device", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        pending: list[Entry] = []
        while True:
            try:
                pending.append(self._entries.get(timeout=0 if pending else IDLE_SECONDS))
            except queue.Empty:
                if not pending:
                    with self._lock:
                        if not self._entries.empty():
                            continue
                        self._thread = None
                        return
                pending = self._sweep(pending)

    def _sweep(self, pending: list[Entry]) -> list[Entry]:
        """Ends what is over; if nothing is, waits a little for the oldest. Returns the rest."""
        rest = [entry for entry in pending if not _ended(*entry)]
        if len(rest) == len(pending):
            bounce, operation = rest[0]
            if operation is None or operation.poll(SWEEP_SECONDS):
                with contextlib.suppress(RuntimeError):  # the next sweep says so
                    bounce.wait_for_copies()
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
