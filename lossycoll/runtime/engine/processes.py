"""State of a process of this machine, by its number, as the kernel has it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

DEAD, STOPPED, RUNS, ELSEWHERE = "dead", "stopped", "runs", "elsewhere"
_STATES: Final = {"Z": DEAD, "X": DEAD, "x": DEAD, "T": STOPPED, "t": STOPPED}


def space() -> int:
    """The namespace in which this process counts processes; 0: unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third one on: names have spaces and brackets."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()


def start_of(pid: int) -> int:
    """When a process began, in ticks of the machine; 0: it isn't there, or that can't be told."""
    try:
        return int(_stat(pid)[19])
    except (OSError, ValueError, IndexError):
        return 0


def state_of(pid: int, start: int, of_space: int) -> str:
    """What the kernel says of a process."""
    if of_space != space():
        return ELSEWHERE
    try:
        fields = _stat(pid)
        began = int(fields[19])
    except FileNotFoundError:
        return DEAD
    except (OSError, ValueError, IndexError):
        return ELSEWHERE
    return DEAD if began != start else _STATES.get(fields[0], RUNS)
