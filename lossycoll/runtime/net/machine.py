"""Machine of this process, and the cores and memory that its control groups let it have.

Memory that processes share is charged when it is touched. Where a control group is full by then the
kernel ends a process, so a host looks before it asks for memory to share.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = Path("/proc/self/ns")
PROC: Final = Path("/proc")
MOUNTS: Final = Path("/sys/fs/cgroup")
NO_LIMIT: Final = 1 << 60
"""Version 1 has a number of about that size where there is no limit."""
MEMORY_FILES: Final = {
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "total_active_file",
    ),
    2: ("memory.max", "memory.current", "inactive_file", "active_file"),
}
"""By version: the files of limit and usage, and what in memory.stat the kernel would drop."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides whom a process can share memory with: abstract Unix sockets are of a network
    namespace, and who is at the other end is judged by its user. Whether two that are alike share
    memory, only the attempt tells: images that were cloned after they had booted are alike."""

    boot: str  # the kernel's number of this boot
    network: int  # its network namespace
    users: int  # its user namespace
    user: int  # its user there

    def to_json(self) -> list[Any]:
        """JSON for a hello."""
        return list(astuple(self))

    @classmethod
    def from_json(cls, said: Any) -> Machine | None:
        """Reads what another rank says; None where that isn't a machine."""
        is_one = isinstance(said, list) and [*map(type, said)] == [str, int, int, int]
        return cls(*said) if is_one else None


def this_machine() -> Machine:
    """This process's."""
    boot = BOOT_ID.read_text(encoding="ascii").strip()
    network, users = ((NAMESPACES / name).stat().st_ino for name in ("net", "user"))
    return Machine(boot, network, users, os.geteuid())


def groups_of(controller: str, proc: Path, mounts: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each group that this process is in, from its own up to the root. Those
    that aren't seen from here are left out. A folder need not have the controller's files."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for root in (mounts, mounts / "unified"):
                yield from _upwards(2, root, path)
        elif controller in controllers.split(","):
            yield from _upwards(1, mounts / controller, path)


def _upwards(version: int, root: Path, path: str) -> Iterator[tuple[int, Path]]:
    own = PurePosixPath(path.lstrip("/"))
    for part in (own, *own.parents):
        folder = root / part
        if folder.is_dir():
            yield version, folder


def numbers(path: Path) -> list[int | None]:
    """The words of a file, None for those that are no numbers ("max"); empty: no such file."""
    try:
        words = path.read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return []
    return [int(word) if word.removeprefix("-").isdecimal() else None for word in words]


def core_mask() -> int:
    """The cores that the process may run on, one bit each."""
    return sum(1 << core for core in os.sched_getaffinity(0))


def core_limit(proc: Path = PROC, mounts: Path = MOUNTS) -> float:
    """Number of cores whose time its control groups let it have; infinite without a limit."""
    limits = (_limit(version, folder) for version, folder in groups_of("cpu", proc, mounts))
    return min(limits, default=math.inf)


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


def memory_room(proc: Path = PROC, mounts: Path = MOUNTS) -> float:
    """Bytes that can be had without anything being ended; infinite if nothing says so. What the
    kernel would drop for it (its cache of files) counts as free."""
    of_machine = 1024.0 * _table(proc / "meminfo").get("MemAvailable:", math.inf)
    groups = groups_of("memory", proc, mounts)
    return min([of_machine, *(_room(folder, *MEMORY_FILES[version]) for version, folder in groups)])


def _room(folder: Path, limit_file: str, used_file: str, *cache: str) -> float:
    limit, used = ((*numbers(folder / name), None)[0] for name in (limit_file, used_file))
    if limit is None or used is None or limit >= NO_LIMIT:
        return math.inf
    stat = _table(folder / "memory.stat")
    return max(0.0, limit - used + sum(stat.get(name, 0) for name in cache))


def _table(path: Path) -> dict[str, int]:
    """A file's rows of a name and a number."""
    try:
        rows = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
