"""A signal's handler on top of any instruction: at a chosen one rather than when chance has it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any


def interrupted(
    number: int, module: ModuleType, handler: Callable[[], object], body: Callable[[], object]
) -> bool:
    """Runs ``body``, and ``handler`` before the ``number``-th instruction that it executes in
    functions of ``module``: in the same thread, on top of the frame that is at it, as signals'
    handlers run.

    Returns:
        Whether there was such an instruction.
    """
    seen = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal seen
        frame.f_trace_opcodes = frame.f_code.co_filename == module.__file__
        if event == "opcode":
            seen += 1
            if seen == number:
                handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        body()
    finally:
        sys.settrace(before)
    return seen >= number
