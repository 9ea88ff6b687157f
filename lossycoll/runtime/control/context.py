"""ZeroMQ's context of this process: one I/O thread for all of its transports, while there are any.

libzmq aborts the process where it can't have descriptors for a context, so they are tried first.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

from .curve import Keys, Roster

if TYPE_CHECKING:
    import zmq

DESCRIPTORS: Final = 12
"""Descriptors of a context and its first transport."""


def load() -> None:
    """Imports libzmq's binding now, which takes 20 ms: before a moment that has to be short."""
    import zmq  # noqa: F401 (what is imported is kept)


class SharedContext:
    """Counts its users: the first one makes the context, and the last one ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._roster: Roster | None = None

    def acquire(self, keys: Keys | None) -> tuple[zmq.Context[zmq.Socket[bytes]], Roster | None]:
        """Returns the context, and with keys its roster. Undone by :meth:`release`. ``keys``: whose
        callers its listeners are to admit; None: all is in clear. OSError: the process is short of
        descriptors."""
        import zmq

        with self._lock:
            if self._context is None:
                _try_descriptors()
                self._context = zmq.Context(io_threads=1)
            try:
                if keys is not None:
                    if self._roster is None:
                        self._roster = Roster(self._context)
                    self._roster.admit(keys)
            except zmq.ZMQError:
                if not self._users:
                    self._end()
                raise
            self._users += 1
            return self._context, None if keys is None else self._roster

    def release(self) -> None:
        """Undoes ``acquire``. The last one returns when threads and descriptors are gone."""
        with self._lock:
            self._users -= 1
            if not self._users:
                self._end()

    def forget(self) -> None:
        """In a forked child: the context is the parent's."""
        # Kept, since the end of a context waits for threads that a child doesn't have.
        _of_parents.append((self._context, self._roster))
        self._lock = threading.Lock()
        self._users, self._context, self._roster = 0, None, None

    def _end(self) -> None:
        context, self._context = self._context, None
        roster, self._roster = self._roster, None
        if roster is not None:
            roster.close()
        if context is not None:
            context.term()


_of_parents: Final[list[object]] = []
SHARED: Final = SharedContext()


def _try_descriptors() -> None:
    taken: list[int] = []
    try:
        for _ in range(DESCRIPTORS):
            taken.append(os.eventfd(0, os.EFD_CLOEXEC))
    finally:
        for fd in taken:
            os.close(fd)
