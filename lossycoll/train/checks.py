"""What an argument has to be. True and False are numbers to Python, and mistakes here."""

from __future__ import annotations

import math
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """NaN and inf are numbers too."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object, low: int, high: float = math.inf) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
