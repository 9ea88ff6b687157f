"""Processes of a laboratory: the ranks of a job, and roles of its own (process.py)."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _lab
from ..errors import LabError
from ..options.ranges import is_whole
from .network import Network, wrong

if TYPE_CHECKING:
    from .laboratory import Lab

MASTER_PORT: Final = 29400
POLL_SECONDS: Final = 0.05
GRACE_SECONDS: Final = 30.0
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


@dataclass(frozen=True)
class Ended:
    """Exit status and output of one rank."""

    rank: int  # its number
    code: int  # exit status; negative for a signal
    output: str = ""  # stdout and stderr together, where it was kept

    @property
    def status(self) -> int:
        """Status as a shell would report it: 128 and the signal's number."""
        return self.code if self.code >= 0 else 128 - self.code


def rank_environment(rank: int, network: Network, world: int, master: str) -> dict[str, str]:
    """Variables that torchrun would give a rank of a node, the interface and the site. The first
    ``world`` ranks of ``network`` take part."""
    host, local = network.place_of(rank)
    first, last = rank - local, network.place_of(world - 1)[0]
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(min(network.ranks_by_host[host], world - first)),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(last + 1),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(MASTER_PORT),
        "LOSSYCOLL_INTERFACE": "eth0",
        "LOSSYCOLL_HOST": f"host{host}",  # so that nobody looks for memory of other hosts
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
    }
    if network.sites > 1:
        variables["LOSSYCOLL_SITE"] = f"site{network.site_of(host)}"
    return variables


def run_ranks(
    lab: Lab,
    command: Sequence[str],
    environment: Mapping[str, str | None],
    *,
    ranks: int | None = None,
    timeout: float | None = None,
    grace: float = GRACE_SECONDS,
    on_line: Callable[[int, str], None] | None = None,
    at: Sequence[tuple[float, Callable[[], None]]] = (),
) -> list[Ended]:
    """Runs ``command`` as the ranks of one job, on their hosts; returns when all have ended.

    Ranks are ended by SIGTERM, and 5 s later by SIGKILL, when another has failed and ``grace``
    seconds are over, after ``timeout`` seconds, and when this process is interrupted. The first
    ``ranks`` take part; None: all. ``on_line`` is given (rank, line) as lines are written, and ends
    the job by an exception; without it output is kept and returned. ``at`` has what to call when,
    in seconds from the start of all.
    """
    network = lab.network
    world = network.world if ranks is None else ranks
    if not is_whole(world, 1, network.world):
        raise wrong("ranks", ranks, f"a whole number from 1 to {network.world}")
    kept: list[list[str]] = [[] for _ in range(world)]
    processes: list[subprocess.Popen[Any]] = []
    readers = []
    failed: list[Exception] = []

    def keep(rank: int, line: str) -> None:
        kept[rank].append(line)

    try:
        for rank in range(world):
            own = rank_environment(rank, network, world, lab.address(0))
            process = lab.start(
                network.place_of(rank)[0],
                command,
                # What the caller says goes first, but for who is who.
                {**own, **environment, "RANK": str(rank), "WORLD_SIZE": str(world)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            processes.append(process)
            readers.append(_reader(process, rank, on_line or keep, failed))
        _await(processes, timeout, grace, at, failed)
    finally:
        end(processes)
        for reader in readers:
            reader.join(1.0)
    if failed:  # by the last lines
        raise failed[0]
    return [Ended(n, process.returncode, "".join(kept[n])) for n, process in enumerate(processes)]


def _reader(
    process: subprocess.Popen[Any],
    rank: int,
    sink: Callable[[int, str], None],
    failed: list[Exception],
) -> threading.Thread:
    """Thread that hands a rank's lines to ``sink``, until any sink has failed. It reads on then:
    a rank whose pipe is full would wait for ever, and could not end."""

    def follow() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if failed:
                continue
            try:
                sink(rank, line)
            except Exception as error:
                failed.append(error)

    # A rank's child may hold the pipe open for longer.
    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    return reader


def _await(
    processes: Sequence[subprocess.Popen[Any]],
    timeout: float | None,
    grace: float,
    at: Sequence[tuple[float, Callable[[], None]]],
    unread: Sequence[Exception],
) -> None:
    """Returns when all have ended, or one failed and the others had their time, or at timeout.
    ``unread``: why lines could not be handed on, which is raised."""
    start = time.monotonic()
    end_at = math.inf if timeout is None else start + timeout
    failed = False
    upcoming = sorted(at, key=lambda one: one[0])
    while True:
        codes = [process.poll() for process in processes]
        if unread:
            raise unread[0]
        if None not in codes:
            return
        now = time.monotonic()
        while upcoming and upcoming[0][0] <= now - start:
            upcoming.pop(0)[1]()
        if not failed and any(codes):
            failed = True
            end_at = min(end_at, now + grace)
        if now > end_at:
            return
        time.sleep(POLL_SECONDS)


def end(processes: Sequence[subprocess.Popen[Any]], grace: float = 5.0) -> None:
    """Ends processes that lead sessions, and returns when they are gone."""
    for which in (signal.SIGTERM, signal.SIGKILL):
        left = [process for process in processes if process.poll() is None]
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, which)
        until = time.monotonic() + grace
        while any(process.poll() is None for process in left) and time.monotonic() < until:
            time.sleep(POLL_SECONDS)


def prefixed(rank: int, line: str) -> None:
    """Prints a rank's line. BrokenPipeError: nobody reads; LabError: it can't be written."""
    text = f"[{rank}] {line}" if line.endswith("\n") else f"[{rank}] {line}\n"
    encoding = sys.stdout.encoding or "utf-8"  # in which a terminal may lack what a rank prints
    try:
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LabError(f"the ranks' output can't be written: {error.strerror}") from error


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
