"""Keeps torch.compile out of what torch calls on a process group.

While a compiled model runs, torch looks at every Python frame, and so at ours: DDP's reducer (C++)
calls them in the middle of a forward. It would trace into them, and fail at the first attribute.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

import torch

T = TypeVar("T", bound=type)


def opaque(cls: T) -> T:
    """A class decorator: its methods, and all that they call, run as they are.

    What ``torch.compiler.disable`` does, without the seconds that importing the compiler takes and
    without a wrapper around each call.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    for member in vars(cls).values():
        if isinstance(member, FunctionType):
            strategy = frames._FrameExecStrategy(skip, skip)
            frames.set_code_exec_strategy(member.__code__, strategy)
    return cls
