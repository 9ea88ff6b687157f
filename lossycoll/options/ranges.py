"""Bounds of numbers, and checks. True and False are numbers to Python, and mistakes here."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TypeGuard


@dataclass(frozen=True)
class Between:
    """Bounds of a number, both included."""

    least: float
    most: float


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is an int or a float; NaN and infinity are."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object, low: int, high: float = math.inf) -> TypeGuard[int]:
    """Return whether ``value`` is an int from ``low`` to ``high``, both included."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_real(value: object, low: float, high: float) -> TypeGuard[float]:
    """Return whether ``value`` is a finite number from ``low`` to ``high``, both included."""
    # By comparison alone: an int may be larger than any float.
    most = sys.float_info.max
    return is_number(value) and max(low, -most) <= value <= min(high, most)
