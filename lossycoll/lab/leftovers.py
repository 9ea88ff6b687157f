"""Processes of laboratories that have ended.

Everything that a laboratory starts carries the laboratory's name in its environment, and its switch
also as its last argument, which all users can read. The switch is the first process of a laboratory
and ends the others when it ends, even when its maker is killed, unless it is killed itself: what is
found here is from such a case. Nothing else is left: namespaces and devices have no names, and
vanish with the processes in them.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MARK: Final = "NAME_OF_LOSSY_LAB"
"""The variable that holds the name. Options begin with LOSSYCOLL_, so this doesn't."""


@dataclass(frozen=True)
class Process:
    """A process of a laboratory. ``alive``: whether the laboratory's switch still is."""

    pid: int
    lab: str
    alive: bool
    command: str


def new_name() -> str:
    return f"{secrets.token_hex(4)}-{os.getpid()}"


def find() -> list[Process]:
    """All processes of laboratories that this user can see."""
    mark = re.compile(rb"(?:^|\0)" + MARK.encode() + rb"=([^\0]*)")
    found = {folder: of[1] for folder, text in _read("environ") if (of := mark.search(text))}
    # Read afterwards, as a switch starts before what is found.
    commands = dict(_read("cmdline")) if found else {}
    switch = re.compile(rb"/process\.py\0[^\0]*\0switch\0(?:\d+\0){2}([^\0]*)\0$")
    alive = {of[1] for text in commands.values() if (of := switch.search(text))}
    return [
        Process(
            int(folder.name),
            name.decode(errors="replace"),
            name in alive,
            commands[folder].decode(errors="replace").replace("\0", " ").strip(),
        )
        for folder, name in found.items()
        if folder in commands
    ]


def _read(file: str) -> Iterator[tuple[Path, bytes]]:
    """A file of each process, by its folder, but of those that end meanwhile or are others'."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield folder, (folder / file).read_bytes()


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
