"""The Python stacks of this process, as text."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Final

MOST_TEXT: Final = 1 << 18
OWN: Final = "lossycoll-"
"""Names of this package's threads begin so; they wait for what happens, and are left out."""


def python_stacks() -> str:
    """The stack of every thread but this package's, the main one first, each with the innermost
    frame last."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident in sorted(frames, key=lambda one: (one != main, one)):
        if str(names.get(ident, "")).startswith(OWN):
            continue
        stack = "".join(traceback.format_stack(frames[ident]))
        parts.append(f"thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)[:MOST_TEXT]
