"""The folder of status pages: of this user alone, on this machine, in memory where there is some.

Whoever else could write there could lie to the user, and whoever else could read there would learn
what the job does. So a folder of another owner, of a wider mode, or by a link is refused.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

NAME: Final = "lossycoll"
MEMORY: Final = Path("/dev/shm")
"""Taken where the user has no folder of its own: writes to a page there never wait for a disk."""
DISK: Final = Path("/tmp")


class UnsafeFolder(OSError):
    """The folder isn't this user's alone."""


def folder() -> Path:
    """Where the pages of this user are: in XDG_RUNTIME_DIR, else in memory, else on the disk."""
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(own) and os.path.isdir(own) and os.stat(own).st_uid == os.getuid():
        return Path(own) / NAME  # sudo may have kept another user's
    return (MEMORY if os.path.isdir(MEMORY) else DISK) / f"{NAME}-{os.getuid()}"


def make_folder() -> Path:
    """Makes the folder, unless it is there."""
    path = folder()
    try:
        path.mkdir(0o700)
    except FileExistsError:
        check_folder(path)
    return path


def check_folder(path: Path) -> None:
    """Raises UnsafeFolder for a folder that others can write to, read or enter, and for a link."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeFolder(f"{path} is no folder; remove it")
    if found.st_uid != os.getuid():
        raise UnsafeFolder(f"{path} belongs to user {found.st_uid}, wanted {os.getuid()}")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise UnsafeFolder(f"{path} has mode {mode:04o}, wanted 0700: chmod 700 {path}")


def open_page(path: Path) -> int:
    """Opens a page to read it; returns the descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
        os.close(descriptor)
        raise UnsafeFolder(f"{path} is no file of user {os.getuid()}")
    return descriptor
