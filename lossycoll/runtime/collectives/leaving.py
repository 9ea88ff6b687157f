"""End of a group at one rank: it doesn't leave before the others have what they need of it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Final

from lossycoll.runtime.core.call import Collective
from lossycoll.runtime.core.logfmt import event, log

from .group_context import GroupContext
from .group_stats import GroupStats
from .operations import Operations
from .watcher import Watcher

LINGER_SECONDS: Final = 1.0
"""Time that a leaving rank waits for the others to leave, too."""
INTERRUPTED_SECONDS: Final = 0.1
"""The same, where a signal's handler leaves on top of a call that waits: that call would have to
end first, and the others can't leave before it does."""


class Leaving:
    """End of one group at this rank."""

    def __init__(
        self, context: GroupContext, operations: Operations, watcher: Watcher, stats: GroupStats
    ) -> None:
        self._health = context.health
        self._where = context.health.where
        self._options = context.options
        self._engine = context.engine
        self._control = context.control
        self._operations = operations
        self._watcher = watcher
        self._stats = stats
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._closed = self._announced = self._awaited_delivery = False

    def close(self) -> None:
        """Announces to the other ranks that this one leaves, ends what is pending, joins threads.
        Idempotent; if Ctrl-C interrupts it, the next call does the rest."""
        if os.getpid() != self._pid or not self._closing.acquire(blocking=False):
            return
        try:
            if not self._closed:
                self._leave()
                self._closed = True
        finally:
            self._closing.release()

    def _leave(self) -> None:
        self._await_delivery()
        self._health.closed = True
        if self._control is not None and not self._announced:
            interrupted = self._engine is not None and self._engine.is_interrupted()
            patience = INTERRUPTED_SECONDS if interrupted else LINGER_SECONDS
            last = self._last_finished(patience)
            self._announced = True
            self._control.leave(last, _own_error())
            self._health.await_others(patience)
        self._stats.tell_missing()
        self._stats.own()
        self._watcher.join()
        if self._control is not None:
            self._control.close()
        if self._options.inject:
            # Otherwise a run in which nothing was dropped would look like one that loss can't harm.
            found = self._stats.stats()
            counts = {name: getattr(found, name) for name in ("packets_sent", "packets_injected")}
            event(logging.INFO, self._where, "left", **counts)
        if self._engine is not None:
            self._engine.close()
        for operation in list(self._operations.unfinished.values()):
            operation.complete()
        self._health.detach()

    def _await_delivery(self) -> None:
        """Waits until the other ranks have what they need of calls that were done here before.

        The calls' own timeouts bound that; after an error of this rank's own, a second does. Once:
        who interrupts it doesn't have to do so again at exit.
        """
        if self._engine is None or self._awaited_delivery:
            return
        self._awaited_delivery = True
        begin = time.monotonic()
        last = self._health.last_call()
        wait = None if last is None else self._health.long_wait(last, begin)
        pause, lingered, sound = 0.0002, False, self._health.failure is None
        while self._engine.lingering()[0] and self._health.failure is None:
            lingered = True
            now = time.monotonic()
            if now - begin > LINGER_SECONDS and _own_error():
                break
            if wait is not None:
                wait.ask_if_due(now)
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        failure = self._operations.group_failure(Collective("call")) if sound else None
        if failure is not None or (lingered and self._engine.lingering()[0]):
            log.warning(
                "%s: leaves, and other ranks may lack data of calls that were done here: %s",
                self._where,
                failure or "they have not taken part in them",
            )

    def finish_delivery(self, call: Collective) -> None:
        """Waits, a second at most, until the other ranks have what they need of the calls before
        ``call``, which were done here: its error would overtake that, and fail those calls."""
        end, engine = time.monotonic() + LINGER_SECONDS, self._engine
        while engine is not None and self._health.failure is None and time.monotonic() < end:
            lingering, oldest = engine.lingering()
            of = self._health.call_of(oldest)
            if not lingering or (of is not None and 0 <= call.seq <= of.seq):
                return
            time.sleep(0.0005)

    def _last_finished(self, patience: float) -> int:
        """Number of the last call in which no other rank needs this one any more. Pending
        operations get ``patience`` seconds to end: others may wait for them."""
        end = time.monotonic() + patience
        for operation in list(self._operations.unfinished.values()):
            while not operation.poll(end - time.monotonic()):
                if self._health.failure is not None or time.monotonic() >= end:
                    return operation.call.seq - 1
        last, failed = self._health.seq, self._operations.first_failed
        if failed is not None:
            last = min(failed - 1, last)
        lingering, oldest = self._engine.lingering() if self._engine is not None else (0, 0)
        call = self._health.call_of(oldest) if lingering else None
        # The first that is done here and not everywhere.
        return last if call is None else min(call.seq - 1, last)


def _own_error() -> str:
    """The exception by which this rank leaves: in flight, or what has ended its script."""
    uncaught = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    error = sys.exc_info()[1] or uncaught
    if not isinstance(error, Exception):
        return ""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
