"""Processes that begin with torch imported: forks of one server, which has imported it once.

Importing torch takes seconds of CPU and a fork milliseconds, and the tests start hundreds of ranks.
The server never has a second thread nor a group, so its forks are sound. A forked process ends
as one that was started afresh: its interpreter is finalized, with all that is still in it. Only one
that ends well, and has neither a group nor a thread left, is spared that: torch alone would be
finalized, which takes more CPU than what most tests have their ranks do.

What a fork shares with the others is what was fixed when the server started: the seed of str hashes
and what torch reads from the environment when it is imported (OMP_NUM_THREADS for one).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import pickle
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.support import warm

PRELOADED = (
    *("numpy", "pytest", "torch.distributed.fsdp", "torch._dynamo", "torch.distributed.run"),
    *("encodings.idna", "zmq", "tests.support.harness"),
    *(
        "lossycoll.backend.process_group",
        "lossycoll.backend.devices",
        "lossycoll.train.drift.bound",
    ),
    *("lossycoll.train.sharded.optimizer", "lossycoll.train.dropcompute.controller"),
    "lossycoll.train.hooks",
)
"""What most ranks need: an optimizer imports torch._dynamo."""
PRIVATE = ("torch.profiler._cupti_monitor",)
"""The same, in some versions of torch."""
LARGEST = 1 << 20
POLL_SECONDS = 0.005


class Process:
    """A forked process, to be used like a :class:`subprocess.Popen`."""

    def __init__(self, server: Server, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._server.ask(self.pid)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout)
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, which: signal.Signals) -> None:
        # Until it was polled dead it is a zombie at least, so the pid is still its own.
        if self.poll() is None:
            os.kill(self.pid, which)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The process that forks. It ends, and all that it forked, when this process is gone.

    ``python``: an executable, the interpreter of support/warm.py.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        # Of packets, so that a question that was interrupted leaves no half of itself.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asked = 0
        self._folder = tempfile.TemporaryDirectory()
        self.python = str(Path(self._folder.name) / "python")
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # to an abstract address of the kernel's choice
            listener.listen(64)
            client = (sys.executable, "-IS", warm.__file__, listener.getsockname()[1:].decode())
            Path(self.python).write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
            Path(self.python).chmod(0o700)
            fds = (theirs.fileno(), listener.fileno())
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"from tests.support import forks; forks.serve(*{fds}, {self.python!r})",
                ],
                env=dict(env),
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        atexit.register(self.close)
        self.ask(None)  # importing is over, so it counts for no rank's time

    def start(self, function: str, *args: str, env: Mapping[str, str], output: Path) -> Process:
        """Calls ``function``, named as "module:function", in a process of its own.

        ``env`` is its whole environment, ``output`` the file of its stdout and stderr.
        """
        return Process(self, self.ask((function, args, dict(env), str(output))))

    def ask(self, question: Any) -> Any:
        """The answer to a call to fork is a pid, the one to a pid its exit status, or None.

        None asks nothing but whether the server is there.
        """
        self._asked += 1
        self._socket.send(pickle.dumps((self._asked, question)))
        while packet := self._socket.recv(LARGEST):
            number, answer = pickle.loads(packet)
            if number == self._asked:  # others are for questions that were interrupted
                return answer
        raise RuntimeError(f"the server of forks has ended: status {self._process.wait()}")

    def close(self) -> None:
        self._socket.close()
        self._process.wait()
        self._folder.cleanup()


def serve(owners: int, listeners: int, python: str) -> None:
    """The server's life. In a forked process it returns once the function has ended.

    ``owners`` and ``listeners``: descriptors of sockets; ``python``: the executable of
    support/warm.py.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    for name in PRIVATE:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.freeze()  # else the first collection of each fork copies all that was imported
    with socket.socket(fileno=owners) as owner, socket.socket(fileno=listeners) as listener:
        task = _answer(owner, listener, python)
    if task is not None:
        _finish(task)


def _finish(task: Callable[[], None]) -> None:
    """Does what the fork is for; returns if its interpreter has something of ours to finalize."""
    try:
        task()
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    groups = importlib.import_module("torch").distributed
    if len(os.listdir("/proc/self/task")) == 1 and not groups.is_initialized():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _answer(
    owner: socket.socket, listener: socket.socket, python: str
) -> Callable[[], None] | None:
    """Forks on demand, until the owner is gone. Returns in each fork, with what that is to do."""
    alive: set[int] = set()
    keepers: set[int] = set()
    while True:
        if listener in select.select([owner, listener], [], [])[0]:
            keepers = {pid for pid in keepers if not os.waitpid(pid, os.WNOHANG)[0]}
            connection = listener.accept()[0]
            if not (pid := _fork()):
                return partial(warm.serve, connection, python, adopt)
            keepers.add(pid)
            connection.close()
            continue
        packet = owner.recv(LARGEST)
        if not packet:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            return None
        number, question = pickle.loads(packet)
        answer: int | None = None
        if isinstance(question, int):
            pid, status = os.waitpid(question, os.WNOHANG)
            alive.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif question is not None:
            answer = _fork()
            if not answer:
                return partial(_run, *question)
            alive.add(answer)
        owner.send(pickle.dumps((number, answer)))


def _fork() -> int:
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"there are {threads} threads where a fork needs a single one"
    return os.fork()


def _run(function: str, args: tuple[str, ...], env: dict[str, str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    adopt(env)
    _call(function, *args)


def adopt(env: Mapping[str, str]) -> None:
    """In a fork: ``env`` is its whole environment from now on."""
    os.environ.clear()
    os.environ.update(env)
    if "LOSSYCOLL_REPLACE" in env:  # torch's hook read it when the server imported torch
        from lossycoll._autoload import register

        register()
    tempfile.tempdir = None  # it's found out once, from TMPDIR
    # torch reads this variable when it is imported.
    importlib.import_module("torch").distributed.set_debug_level_from_env()


def start_afresh(
    function: str, *args: str, env: Mapping[str, str], output: Path
) -> subprocess.Popen[bytes]:
    """As :meth:`Server.start`, but by an interpreter that has imported nothing yet."""
    code = "import sys; from tests.support import forks; forks._call(*sys.argv[1:])"
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-c", code, function, *args], env=dict(env), stdout=file, stderr=file
        )


def _call(function: str, *args: str) -> None:
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*args)
