"""Memory that this process may still take: of the machine's, and of its control groups'.

Memory that processes share is charged when it is touched. Where a control group is full by then the
kernel ends a process, so a host looks before it asks for memory to share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .control_groups import MOUNTS, PROC, groups_of, numbers

NO_LIMIT: Final = 1 << 60
"""Version 1 has a number of about that size where there is no limit."""


def memory_room(proc: Path = PROC, mounts: Path = MOUNTS) -> float:
    """Bytes that can be had without anything being ended; infinite if nothing says so.

    What the kernel would drop for it (its cache of files) counts as free.
    """
    return min([_of_machine(proc), *_of_groups(proc, mounts)])


def _of_machine(proc: Path) -> float:
    found = _table(proc / "meminfo").get("MemAvailable:")
    return math.inf if found is None else found * 1024.0


def _of_groups(proc: Path, mounts: Path) -> Iterator[float]:
    """What is free in each of the control groups that this process is in, and those around them."""
    for version, folder in groups_of("memory", proc, mounts):
        yield (_version_2 if version == 2 else _version_1)(folder)


class _Room:
    """Free memory of a control group, by its files."""

    def __init__(self, limit: str, used: str, cache: tuple[str, ...]) -> None:
        self._limit = limit
        self._used = used
        self._cache = cache

    def __call__(self, folder: Path) -> float:
        limit, used = ((*numbers(folder / name), None)[0] for name in (self._limit, self._used))
        if limit is None or used is None or limit >= NO_LIMIT:
            return math.inf
        stat = _table(folder / "memory.stat")
        return max(0.0, limit - used + sum(stat.get(name, 0) for name in self._cache))


_version_1 = _Room(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_version_2 = _Room("memory.max", "memory.current", ("inactive_file", "active_file"))


def _table(path: Path) -> dict[str, int]:
    """A file's rows of a name and a number."""
    try:
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
