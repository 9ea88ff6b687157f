"""Processes that begin with torch imported: forks of one server, which has imported it once.

Importing torch takes seconds of CPU and a fork milliseconds, and the tests start hundreds of ranks.
The server never has a second thread nor a group, so its forks are sound. A forked process ends
as one that was started afresh: its interpreter is finalized, with all that is still in it.

What a fork shares with the others is what was fixed when the server started: the seed of str hashes
and what torch reads from the environment when it is imported (OMP_NUM_THREADS for one).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PRELOADED = ("numpy", "pytest", "torch.distributed.fsdp", "torch._dynamo", "lossycoll.backend")
"""What most ranks need: an optimizer imports torch._dynamo."""
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
    """The process that forks. It ends, and all that it forked, when this process is gone."""

    def __init__(self, env: Mapping[str, str]) -> None:
        # Of packets, so that a question that was interrupted leaves no half of itself.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asked = 0
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"import forks; forks.serve({theirs.fileno()})"],
                env=dict(env),
                pass_fds=[theirs.fileno()],
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


def serve(fd: int) -> None:
    """The server's life. In a forked process it returns once the function has ended."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # else the first collection of each fork copies all that was imported
    alive: set[int] = set()
    with socket.socket(fileno=fd) as connection:
        while packet := connection.recv(LARGEST):
            number, question = pickle.loads(packet)
            if isinstance(question, int):
                pid, status = os.waitpid(question, os.WNOHANG)
                alive.discard(pid)
                answer = os.waitstatus_to_exitcode(status) if pid else None
            elif question is None:
                answer = None
            else:
                answer = _fork()
                if not answer:
                    break
                alive.add(answer)
            connection.send(pickle.dumps((number, answer)))
        else:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            return
    _run(*question)


def _fork() -> int:
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"there are {threads} threads where a fork needs a single one"
    return os.fork()


def _run(function: str, args: tuple[str, ...], env: dict[str, str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.environ.clear()
    os.environ.update(env)
    # torch reads this variable when it is imported.
    importlib.import_module("torch").distributed.set_debug_level_from_env()
    _call(function, *args)


def start_afresh(
    function: str, *args: str, env: Mapping[str, str], output: Path
) -> subprocess.Popen[bytes]:
    """As :meth:`Server.start`, but by an interpreter that has imported nothing yet."""
    code = "import forks, sys; forks._call(*sys.argv[1:])"
    with output.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-c", code, function, *args], env=dict(env), stdout=file, stderr=file
        )


def _call(function: str, *args: str) -> None:
    module, _, name = function.partition(":")
    getattr(importlib.import_module(module), name)(*args)
