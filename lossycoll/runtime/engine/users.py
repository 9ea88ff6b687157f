"""Who is inside the engine's library, so that what they use is freed only when nobody is."""

from __future__ import annotations

import os
import threading

from lossycoll.errors import ClosedError

from .failures import Where


class Users:
    """The users of a group, each of them in a ``with`` block.

    Args:
        where: The group, as errors name it.

    Raises:
        ClosedError: On entering: the group was closed, or belongs to the process that this one was
            forked from. What a forked child sent would go out under its parent's numbers.
    """

    __slots__ = ("_closing", "_count", "_idle", "_lock", "_pid", "_where")

    def __init__(self, where: Where) -> None:
        self._where = where
        self._pid = os.getpid()
        self._count = 0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._closing = False

    def __enter__(self) -> None:
        # Before the lock, which another thread may have held at the fork.
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self._where}: the group belongs to process {self._pid}, from which process "
                f"{os.getpid()} was forked"
            )
        with self._lock:
            if self._closing:
                raise ClosedError(f"{self._where}: the group was destroyed")
            self._count += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._count -= 1
            if self._closing:
                self._idle.notify_all()

    def refuse(self) -> bool:
        """No others come in from now on. Returns whether it is this call that ends the group's use:
        not where it has ended before, nor in a forked child."""
        if os.getpid() != self._pid:
            return False
        with self._lock:
            first, self._closing = not self._closing, True
        return first

    def wait(self) -> None:
        """Until nobody is inside. After :meth:`refuse`."""
        with self._idle:
            self._idle.wait_for(lambda: self._count == 0)
