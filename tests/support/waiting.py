"""Waiting for what is to happen, in place of sleeping until it must have."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(
    condition: Callable[[], object], what: str = "the condition", *, seconds: float = 60.0
) -> None:
    """Returns when ``condition`` holds; fails the test if not within ``seconds``: many, since
    a busy machine takes its time, and they cost nothing where it does hold."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.002)
