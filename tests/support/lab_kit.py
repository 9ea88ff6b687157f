"""What tests of a running laboratory share."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lossycoll.lab import leftovers
from lossycoll.lab.backends import missing

ROOT = Path(__file__).resolve().parents[2]
WHY_NOT = missing("switch")

needs_lab = pytest.mark.skipif(bool(WHY_NOT), reason=f"no laboratory here: {WHY_NOT}")


def of_lab(name: str) -> list[int]:
    """Processes of a laboratory that are still there."""
    return [one.pid for one in leftovers.find() if one.lab == name]


def eventually(true: Callable[[], object], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def command(
    *arguments: str, hang_up: signal.Handlers = signal.SIG_DFL, stderr: int = subprocess.STDOUT
) -> Iterator[subprocess.Popen[str]]:
    """``lossycoll lab`` in a process of its own, which is gone when the block ends. ``hang_up``:
    what SIGHUP does to it at first, whatever it does to the tests, which nohup may have started."""
    before = signal.signal(signal.SIGHUP, hang_up)
    process = subprocess.Popen(
        [sys.executable, "-m", "lossycoll.cli", "lab", *arguments],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    signal.signal(signal.SIGHUP, before)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def made_by(maker: int) -> list[leftovers.Process]:
    """Processes of laboratories that the process ``maker`` made, alive or not."""
    return [one for one in leftovers.find() if one.lab.split("-")[1:2] == [str(maker)]]
