"""One rank of :mod:`conformance.fresh`: runs the tests that it is told, one after another."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import traceback
from multiprocessing.connection import Connection

from .modes import CHOICES, MODES
from .runner import MAX_TEXT, PR_SET_PDEATHSIG, Message


def main(mode: str, world: str, tests: str, rank: str, descriptor: str) -> None:
    """Serves a pipe until its other end is closed.

    ``tests``: "gpu", torch's about GPUs on one that ranks share; or "samples", our own cases. Each
    gets its name, its store, and what the suite has set in the environment; then the pipe gets what
    the test tells, and its exit status.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
    from .suite import Suite

    _without_sanitizer()
    given, number = MODES[mode], int(rank)
    samples = tests == "samples"
    suite = Suite(given, int(world), CHOICES["gloo"], samples=samples, one_gpu=not samples)
    pipe = Connection(int(descriptor))
    pipe.send(True)
    with contextlib.suppress(EOFError):
        while True:
            name, store, environment = pipe.recv()
            os.environ |= {**given.env_of(number), **environment}
            pipe.send(_status(suite, number, name, store, pipe))


def _without_sanitizer() -> None:
    """Where something of the suite has switched torch's on, tests take several times as long."""
    from torch.cuda import _sanitizer

    if _sanitizer.cuda_sanitizer.enabled:
        _sanitizer.cuda_sanitizer.disable()  # type: ignore[no-untyped-call]


def _status(suite: object, rank: int, name: str, store: str, pipe: Connection) -> int:
    try:
        suite.run_here(rank, name, store, pipe)  # type: ignore[attr-defined]
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        pipe.send(Message(traceback.format_exc()[-MAX_TEXT:]))
        return 1
    return 0
