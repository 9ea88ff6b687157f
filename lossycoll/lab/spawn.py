"""Starts processes of a laboratory, which all begin with this interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _lab
from ..errors import LabError
from .job import end

if TYPE_CHECKING:
    from .laboratory import Lab

HERE: Final = Path(__file__).resolve().parent
START_SECONDS: Final = 20.0
ANSWER_SECONDS: Final = 300.0


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


class Role:
    """A process of process.py on a host: a context that ends it."""

    def __init__(self, lab: Lab, host: int, role: str, *arguments: object) -> None:
        self.name = f"{role} on host {host}"
        self.process: subprocess.Popen[str] = lab.start(
            host,
            [*own_process(role), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Role:
        return self

    def __exit__(self, *_: object) -> None:
        end([self.process], grace=1.0)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def await_ready(self) -> None:
        """Returns when it listens, or sends."""
        assert self.process.stdout is not None
        watch = threading.Timer(START_SECONDS, self.process.kill)
        watch.start()
        try:
            ready = self.process.stdout.readline() == "ready\n"
        finally:
            watch.cancel()
        if not ready:
            self.answer()
            raise LabError(f"the laboratory's {self.name} ended before it was ready")

    def stop(self) -> None:
        """Closes its stdin: it is to end."""
        if self.process.stdin is not None:
            self.process.stdin.close()
            self.process.stdin = None

    def answer(self) -> Any:
        """What it found, once it has ended."""
        self.stop()
        try:
            text, said = self.process.communicate(timeout=ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            text = f"the laboratory's {self.name} didn't end within {ANSWER_SECONDS:g} s"
            raise LabError(text) from None
        if code := self.process.returncode:
            raise LabError(f"the laboratory's {self.name} ended with status {code}: {said.strip()}")
        return json.loads(text)
