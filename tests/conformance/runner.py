"""Runs one case on forked ranks and judges what became of them.

Importing torch takes seconds and a fork milliseconds, so the caller imports torch once and every
rank of every case is a fork of it. That is only sound while the caller has a single thread, which
is checked before each fork.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

Entry = Callable[[int, Connection], None]
"""What a rank runs. It may raise SystemExit, and send a :class:`Message` or two before it ends."""

GRACE_SECONDS = 2.0
"""How long the other ranks get to fail by themselves after the first one has."""
POLL_SECONDS = 0.01
MAX_TEXT = 20_000  # a pipe holds 64 KiB that nobody has read yet
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Message:
    """What a rank tells: the text of a failure or skip, and counters to be summed over ranks."""

    text: str = ""
    counters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """``kind``: pass, skip, fail or timeout. ``reason``: one line, empty for a pass.

    ``counters``: the ranks' sums.
    """

    kind: str
    reason: str = ""
    seconds: float = 0.0
    counters: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Rank:
    """A rank that runs a case."""

    number: int
    pid: int
    pipe: Connection
    log: Path
    code: int | None = None
    ended: float = 0.0
    killed: bool = False
    messages: list[Message] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The last one: the end of a process can fail in its own way after a test has passed."""
        return next((m.text for m in reversed(self.messages) if m.text), "")

    def running(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.ended = time.monotonic()
                with self.pipe, contextlib.suppress(EOFError):
                    while self.pipe.poll():
                        self.messages.append(self.pipe.recv())
        return self.code is None

    def kill(self) -> None:
        """Ends the rank and all that it started; faulthandler writes where it was."""
        if not self.running():
            return
        self.killed = True
        os.kill(self.pid, signal.SIGABRT)
        end = time.monotonic() + 5
        while self.running() and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            while self.running():
                time.sleep(POLL_SECONDS)

    def failed(self, skips: Mapping[int, str]) -> bool:
        return self.code is not None and self.code != 0 and self.code not in skips


def run(entry: Entry, world: int, *, limit: float, skips: Mapping[int, str]) -> Outcome:
    """Runs ``entry`` on ``world`` forked ranks; ends them all after ``limit`` seconds.

    ``skips``: the reason for each exit status that means a skip. Raises RuntimeError if this
    process has more than one thread.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_fork(entry, number, Path(folder)) for number in range(world)]
        try:
            end = start + limit
            while [rank for rank in ranks if rank.running()]:  # asks every one, unlike any()
                now = time.monotonic()
                if now >= end:
                    break
                if any(rank.failed(skips) for rank in ranks):
                    end = min(end, now + GRACE_SECONDS)
                time.sleep(POLL_SECONDS)
        finally:
            for rank in ranks:
                rank.kill()
        kind, reason = judge(ranks, skips, limit)
    counters: Counter[str] = Counter()
    for rank in ranks:
        for message in rank.messages:
            counters.update(message.counters)
    return Outcome(kind, reason, round(time.monotonic() - start, 2), dict(counters))


def _fork(entry: Entry, number: int, folder: Path) -> Rank:
    tasks = Path("/proc/self/task").iterdir()
    threads = sorted((task / "comm").read_text().strip() for task in tasks)
    if len(threads) != 1:
        raise RuntimeError(f"there are threads {threads} where a fork needs a single one")
    ours, theirs = multiprocessing.Pipe(duplex=False)
    log = folder / f"{number}.log"
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        ours.close()
        _be_a_rank(entry, number, theirs, log, parent)
    theirs.close()
    return Rank(number, pid, ours, log)


def _be_a_rank(entry: Entry, number: int, pipe: Connection, log: Path, parent: int) -> NoReturn:
    """Ends as an interpreter of its own would: with its own exit functions, and no others."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(code)
        atexit._clear()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable()
        entry(number, pipe)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        pipe.send(Message(traceback.format_exc()[-MAX_TEXT:]))
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def judge(ranks: list[Rank], skips: Mapping[int, str], limit: float) -> tuple[str, str]:
    """The kind of outcome, and its reason, of ranks that have all ended, or were ended."""
    failed = [rank for rank in ranks if rank.failed(skips) and not rank.killed]
    if failed:
        failed.sort(key=lambda rank: rank.ended)  # what came first is mostly the cause
        texts: dict[str, int] = {}
        for rank in failed:
            texts.setdefault(first_line(rank.text) or _ended(rank), rank.number)
        return "fail", "; ".join(f"rank {number}: {text}" for text, number in texts.items())
    hung = [rank for rank in ranks if rank.killed]
    if hung:
        places = ", ".join(f"rank {rank.number} in {_where(rank.log)}" for rank in hung)
        return "timeout", f"not done after {limit:g} s: {places}"
    codes = {rank.code for rank in ranks}
    if codes == {0}:
        return "pass", ""
    if len(codes) > 1:
        return "fail", f"the ranks ended differently: {[rank.code for rank in ranks]}"
    return "skip", ranks[0].text or skips[ranks[0].code or 0]


def first_line(text: str) -> str:
    """The line of a traceback that names the error: the first one of the last exception."""
    head, _, tail = text.rpartition("Traceback (most recent call last):\n")
    lines = (tail if head or tail else text).splitlines()
    return next((line.strip() for line in lines if line and not line[0].isspace()), "")


def _ended(rank: Rank) -> str:
    code = rank.code or 0
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _where(log: Path) -> str:
    """The innermost frame of the main thread in what faulthandler wrote."""
    text = log.read_text(encoding="utf-8", errors="replace")
    _, _, stack = text.rpartition("Current thread")
    found = re.search(r'File "(.*?)", line (\d+) in (\S+)', stack)
    if not found:
        return "an unknown place"
    path, line, name = found.groups()
    return f"{name} ({Path(path).name}:{line})"
