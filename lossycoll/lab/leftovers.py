"""Processes of laboratories whose maker is gone.

Everything that a laboratory starts carries the laboratory's name in its environment, and the name
holds the number of the process that made it, and the namespace in which it has that number: in a
container, processes are counted anew. A laboratory cleans up behind itself even when its
maker is killed, unless the switch is killed with it: what is found here is from such a case.
Nothing else is left: namespaces and devices have no names, and vanish with the processes in them.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MARK: Final = "LAB_OF_LOSSYCOLL"
"""The variable that holds the name. Options begin with LOSSYCOLL_, so this doesn't."""


@dataclass(frozen=True)
class Process:
    """A process of a laboratory. ``alive``: whether the laboratory's maker still is."""

    pid: int
    lab: str
    alive: bool
    command: str


def new_name() -> str:
    pid = os.getpid()
    return f"{secrets.token_hex(4)}-{pid}-{_started(pid)}-{_space()}"


def find() -> list[Process]:
    """All processes of laboratories that this user can see."""
    found = []
    mark = re.compile(rb"(?:^|\0)" + MARK.encode() + rb"=([^\0]*)")
    for folder in Path("/proc").glob("[0-9]*"):
        # Those that end meanwhile, or belong to somebody else, are left out.
        with contextlib.suppress(OSError):
            if of := mark.search((folder / "environ").read_bytes()):
                name = of[1].decode(errors="replace")
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                command = " ".join(words).strip()
                found.append(Process(int(folder.name), name, is_alive(name), command))
    return found


def clean() -> list[Process]:
    """Kills what dead laboratories left; returns what that was."""
    killed: dict[int, Process] = {}
    until = time.monotonic() + 5
    while left := [one for one in find() if not one.alive]:
        for one in left:
            killed[one.pid] = one
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, signal.SIGKILL)
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    return list(killed.values())


def is_alive(name: str) -> bool:
    """True if the maker of a laboratory still runs: a process of that number and that start. The
    maker of another namespace, such as a container's, can't be looked up and counts as alive."""
    try:
        _, pid, started, counted_in = name.split("-")
        maker, start, space = int(pid), int(started), int(counted_in)
    except ValueError:
        return True  # of another version, so not ours to judge
    if not space or space != _space():
        return True
    try:
        return _started(maker) == start
    except OSError:
        return False


def _space() -> int:
    """The namespace in which this process counts processes; 0: unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _started(pid: int) -> int:
    """When a process started, in ticks since boot. OSError if there is none."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    # The command, in parentheses, may hold blanks; the start is the 22nd field in all.
    return int(text.rpartition(")")[2].split()[19])
