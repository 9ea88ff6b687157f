"""Starts processes of a laboratory, which all begin with this interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from .. import _lab
from ..errors import LabError

HERE: Final = Path(__file__).resolve().parent


def own_process(role: str) -> list[str]:
    """The command of a process in which nothing but the extension is loaded (process.py)."""
    return [sys.executable, str(HERE / "process.py"), _lab.__file__, role]


def spawn(command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
    """subprocess.Popen; LabError if the program can't be started. A user who isn't root may be kept
    from reading the interpreter, or the folder that it is in."""
    try:
        return subprocess.Popen(command, **how)
    except OSError as error:
        raise LabError(
            f"the laboratory can't run {command[0]} as user {os.geteuid()}: {error.strerror}; it "
            f"wants a Python that this user may read and execute, folders above it included"
        ) from error


def interpreter_problem() -> str:
    """Why this user can't run the interpreter; empty if that works."""
    try:
        spawn([sys.executable, "-I", "-S", "-c", ""], stderr=subprocess.DEVNULL).wait()
    except LabError as error:
        return str(error)
    return ""
