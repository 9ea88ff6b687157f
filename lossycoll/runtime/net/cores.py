"""The cores that this process may use: by its affinity, and by its control groups' limits."""

from __future__ import annotations

import math
import os
from pathlib import Path

from .control_groups import MOUNTS, PROC, groups_of, numbers


def core_mask() -> int:
    """The cores that the process may run on, one bit each."""
    return sum(1 << core for core in os.sched_getaffinity(0))


def core_limit(proc: Path = PROC, mounts: Path = MOUNTS) -> float:
    """How many cores' time its control groups let it have; infinite if nothing says so."""
    return min(
        [math.inf, *(_limit(version, folder) for version, folder in groups_of("cpu", proc, mounts))]
    )


def _limit(version: int, folder: Path) -> float:
    if version == 2:
        words = numbers(folder / "cpu.max")
    else:
        words = numbers(folder / "cpu.cfs_quota_us") + numbers(folder / "cpu.cfs_period_us")
    if len(words) != 2:
        return math.inf
    quota, period = words
    if quota is None or quota < 0 or not period:
        return math.inf
    return quota / period
