"""Shutdown before the interpreter's: groups and swarms first, then threads.

A thread that is inside torch while the interpreter ends brings the process down, with "terminate
called without an active exception".
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Final

JOIN_SECONDS: Final = 5.0
"""Time that the interpreter's end waits for all of them."""

_running: Final[dict[threading.Thread, Callable[[], object]]] = {}


def start_thread(
    target: Callable[[], object], name: str, stop: Callable[[], object] = lambda: None
) -> threading.Thread:
    """Starts a thread that nobody need join; ``stop`` makes ``target`` return soon, at exit."""

    def run() -> None:
        try:
            target()
        finally:
            _running.pop(thread, None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _running[thread] = stop
    try:
        thread.start()
    except BaseException:
        _running.pop(thread, None)
        raise
    return thread


def close_at_exit(close: Callable[[], object]) -> None:
    """Has ``close`` called when the interpreter is about to end, before threads are stopped."""
    atexit.register(close)


def _end_all() -> None:
    # In a forked child none of them is alive.
    left = [(thread, stop) for thread, stop in list(_running.items()) if thread.is_alive()]
    for _, stop in left:
        stop()
    end = time.monotonic() + JOIN_SECONDS
    for thread, _ in left:
        thread.join(max(0.0, end - time.monotonic()))


# The interpreter calls first what was registered last: by close_at_exit, which is later than this.
atexit.register(_end_all)
