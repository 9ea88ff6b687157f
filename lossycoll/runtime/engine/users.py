"""Callers inside the engine's library, counted: what they use is freed when nobody is inside."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final

from lossycoll.errors import ClosedError

from .failures import Where

POLL_SECONDS: Final = 0.001
"""Period at which the closing thread looks whether the others have left."""


class Users:
    """The users of a group, each of them in a ``with`` block.

    No lock: a signal's handler that closes the group runs on top of the frame that it has
    interrupted, which couldn't give a lock back.
    """

    __slots__ = ("_closing", "_first", "_free", "_freed", "_freeing", "_inside", "_pid", "_where")

    def __init__(self, where: Where, free: Callable[[], None]) -> None:
        self._where = where
        self._pid = os.getpid()
        self._inside: dict[int, int] = {}
        """Depth at which each thread is inside."""
        self._closing = False
        self._first, self._freeing = threading.Lock(), threading.Lock()
        """Never waited for: who gets one is the one who closes, or frees."""
        self._free = free
        self._freed = False

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{self._where}: the group belongs to process {self._pid}, from which process "
                f"{os.getpid()} was forked"
            )
        me = threading.get_ident()
        # First in, then the look at whether it is closed; who closes does both the other way round.
        # Nothing is called after it, so that no handler can raise before the block is entered.
        self._inside[me] = self._inside.get(me, 0) + 1
        if self._closing:
            self.__exit__()
            raise ClosedError(f"{self._where}: the group was destroyed")

    def __exit__(self, *exc: object) -> None:
        # Written out: each call of the engine comes through here, and none is spent on another.
        me = threading.get_ident()
        left = self._inside[me] - 1
        if left:
            self._inside[me] = left
        else:
            del self._inside[me]
        if self._closing and not self._inside and self._freeing.acquire(blocking=False):
            self._free()
            self._free = _nothing  # whoever made this is freed without a collector
            self._freed = True

    def has_me(self) -> bool:
        """True if this thread is inside: a signal's handler asks, on top of the frame that is."""
        return threading.get_ident() in self._inside

    def close(self, end: Callable[[], None]) -> None:
        """No others come in from now on; frees when nobody is inside, and returns then.

        Where this thread is inside itself, since a signal's handler closes the group, it returns at
        once, and the frame that was interrupted frees as it leaves. Nothing where the group was
        closed before, or in a forked child.
        """
        if os.getpid() != self._pid or not self._first.acquire(blocking=False):
            return
        with self:
            self._closing = True
            end()
        me = threading.get_ident()
        while not self._freed and me not in self._inside:
            time.sleep(POLL_SECONDS)


def _nothing() -> None:
    pass
