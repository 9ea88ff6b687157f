"""Completion queue of all groups of this process: for its one watcher."""

from __future__ import annotations

import itertools
import os
from typing import Any, Final

from lossycoll._native import ffi, lib

NEXT_SECONDS: Final = 0.1
"""Longest stay in C."""


class Completions:
    """Tickets, in the order in which their operations ended. Never freed: groups name it."""

    def __init__(self) -> None:
        self.handle: Final[Any] = lib.lc_completions_open()
        if self.handle == ffi.NULL:
            raise MemoryError
        self._owners = itertools.count(1)

    def new_owner(self) -> int:
        """A number for a group, which no other one has had."""
        return next(self._owners)

    def next(self) -> tuple[int, int]:
        """Waits for a ticket; returns it and its group's owner. The ticket is 0 where none came for
        a while, and negative when it is stopped."""
        owner = ffi.new("uint64_t *")
        ticket = lib.lc_completions_next(self.handle, int(NEXT_SECONDS * 1e9), owner)
        return int(ticket), int(owner[0])

    def stop(self, stopped: bool) -> None:
        """Makes :meth:`next` return at once, or wait again."""
        lib.lc_completions_stop(self.handle, stopped)


_of_process: Final[dict[int, Completions]] = {}
"""Completions of each process: a forked child has its own."""


def completions() -> Completions:
    """This process's."""
    found = _of_process.get(os.getpid())
    return found or _of_process.setdefault(os.getpid(), Completions())
