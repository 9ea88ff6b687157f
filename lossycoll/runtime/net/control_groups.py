"""The control groups that this process is in, as folders: both versions of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

PROC: Final = Path("/proc")
MOUNTS: Final = Path("/sys/fs/cgroup")


def groups_of(controller: str, proc: Path, mounts: Path) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each group that this process is in, from its own up to the root.

    Those that aren't seen from here are left out. A folder need not have the controller's files.
    """
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
