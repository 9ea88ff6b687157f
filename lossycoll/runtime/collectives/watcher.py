"""The thread that completes what only a future waits for, and asks about calls that take long.

A process has one, for all of its groups. It starts with the first call that needs it, and ends with
the last group that has had one.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final

from lossycoll.errors import ClosedError, EngineError
from lossycoll.runtime.core.call import Operation
from lossycoll.runtime.engine.binding import Completions, completions

from .group_context import GroupContext
from .operations import Operations

ASK_SECONDS: Final = 0.1
"""Period at which calls are looked at that may have taken long."""


class Watcher:
    """Work of the watcher thread for one group."""

    def __init__(self, context: GroupContext, operations: Operations) -> None:
        self._health = context.health
        self._engine = context.engine
        self._operations = operations
        self._lock = threading.RLock()
        self._started = False
        self._at_work = threading.RLock()
        """Held while the thread works for this group; callbacks may close the group."""
        self._ended = False
        self._asked_for: dict[int, Operation] = {}
        """Operations, messages included, by ticket."""

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
        """Ends the thread's work for this group; the group was closed before, so that none begins.

        It waits for a callback of this group's that runs, unless it is called in it, and for none
        of another group's, which may need what the caller does next.
        """
        with self._lock:  # who has seen the group open has started it by now
            started = self._started
        if self._engine is None or not started:
            return
        with self._at_work:
            self._ended = True
        watching().remove(self._engine.owner)

    def take(self, ticket: int) -> None:
        """Completes what the engine has named; in the thread."""
        with self._working():
            if not self._ended:
                found, noted = self._asked_for.pop(ticket, None), self._operations.unfinished
                # It may end before the submitting thread has noted it.
                while found is None and (found := noted.get(ticket)) is None:
                    time.sleep(0.0001)
                found.handed_over()

    def ask_about_all(self, now: float) -> None:
        """Asks the other ranks about calls that take long; in the thread."""
        with self._working():
            for operation in list(self._operations.unfinished.values()):
                operation.ask_if_due(now)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Errors in here fail this group, whose futures would never complete, and no other."""
        with self._at_work:
            try:
                yield
            except Exception as error:
                text = f"{self._health.where}: the thread that completes futures failed: {error!r}"
                self._health.fail(EngineError(text), tell=True)
                thread = threading.current_thread()
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), thread)))

    def _start(self) -> None:
        with self._lock:
            if self._started or self._engine is None or self._health.closed:
                return
            self._started = True
            self._operations.watched = True
            watching().add(self._engine.owner, self)


class Watching:
    """The thread."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._watchers: dict[int, Watcher] = {}

    def add(self, owner: int, watcher: Watcher) -> None:
        """From now on the thread works for group ``owner``."""
        with self._lock:
            self._watchers[owner] = watcher
            if self._thread is None:
                self._completions.stop(False)
                self._thread = threading.Thread(
                    target=self._run, name="lossycoll-complete", daemon=True
                )
                self._thread.start()

    def remove(self, owner: int) -> None:
        """Ends :meth:`add`; after the last one the thread ends, too. Idempotent."""
        with self._lock:
            self._watchers.pop(owner, None)
            if self._watchers or self._thread is None:
                return
            thread, self._thread = self._thread, None
            self._completions.stop(True)
        if threading.current_thread() is not thread:
            thread.join()

    def _run(self) -> None:
        due = 0.0
        while self._thread is threading.current_thread():
            ticket, owner = self._completions.next()
            watcher = self._watchers.get(owner)
            if ticket > 0 and watcher is not None:
                watcher.take(ticket)
            if (now := time.monotonic()) >= due:
                due = now + ASK_SECONDS
                for watcher in list(self._watchers.values()):
                    watcher.ask_about_all(now)


_of_process: Final[dict[int, Watching]] = {}
"""Watcher of each process: threads don't survive a fork."""


def watching() -> Watching:
    """This process's."""
    found = _of_process.get(os.getpid())
    return found or _of_process.setdefault(os.getpid(), Watching(completions()))
