"""Ranks that aren't forks: each is an interpreter of its own, and runs test after test.

For where torch starts CUDA when its suite is imported: no fork of such a process can use the GPU.
Ranks in which a test didn't pass are ended, and others are started for the next one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from .runner import GRACE_SECONDS, POLL_SECONDS, Message, Outcome, Rank, judge

START_SECONDS = 60.0
"""How long importing torch and its suite may take where all cores do so."""
RUNS = "import sys; from tests.conformance.fresh_rank import main; main(*sys.argv[1:])"
INHERITED = ("TEMP_DIR", "INIT_METHOD")
"""What the suite sets in the environment for each test."""


class FreshRanks:
    """The ranks of one mode.

    Args:
        arguments: The mode's name, and the world's size, for ``fresh_rank.main``.
        world: How many ranks.
        skips: The reason for each exit status that means a skip.
    """

    def __init__(self, arguments: tuple[str, ...], world: int, skips: Mapping[int, str]) -> None:
        self._arguments = arguments
        self._world = world
        self._skips = skips
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []

    def run(self, name: str, store: str, limit: float) -> Outcome:
        """Runs one test, and says what became of it."""
        if not self._processes:
            self._start()
        begin = time.monotonic()
        environment = {key: os.environ[key] for key in INHERITED}
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send((name, store, environment))
        ranks = [self._rank(number) for number in range(self._world)]
        end = begin + limit
        while [rank for rank in ranks if not self._ended(rank)]:  # asks every one, unlike any()
            now = time.monotonic()
            if now >= end:
                break
            if any(rank.failed(self._skips) for rank in ranks):
                end = min(end, now + GRACE_SECONDS)
            time.sleep(POLL_SECONDS)
        for rank in ranks:
            rank.killed = rank.code is None
        if any(rank.code != 0 for rank in ranks):
            self.close()
        kind, reason = judge(ranks, self._skips, limit)
        return Outcome(kind, reason, round(time.monotonic() - begin, 2))

    def close(self) -> None:
        """Ends all ranks; faulthandler writes where those are that still run."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        """Starts the ranks, and waits until all have the suite."""
        for number in range(self._world):
            ours, theirs = multiprocessing.Pipe()
            with theirs, open(self._log(number), "wb") as log:
                command = [sys.executable, "-c", RUNS, *self._arguments, str(number)]
                self._processes.append(
                    subprocess.Popen(
                        [*command, str(theirs.fileno())],
                        pass_fds=[theirs.fileno()],
                        stdout=log,
                        stderr=log,
                    )
                )
            self._pipes.append(ours)
        for number, pipe in enumerate(self._pipes):
            try:
                ready = pipe.poll(START_SECONDS) and pipe.recv()
            except (EOFError, OSError):
                ready = False
            if not ready:
                text = self._log(number).read_text(errors="replace")
                self.close()
                raise RuntimeError(f"rank {number} didn't start: {text[-3000:]}")

    def _log(self, number: int) -> Path:
        return Path(self._folder.name, f"{number}.log")

    def _rank(self, number: int) -> Rank:
        process = self._processes[number]
        return Rank(number, process.pid, self._pipes[number], self._log(number))

    def _ended(self, rank: Rank) -> bool:
        """Whether the test is over at a rank; takes what it has told."""
        while rank.code is None:
            try:
                if not rank.pipe.poll():
                    break
                told = rank.pipe.recv()
            except (EOFError, OSError):  # its process has ended
                rank.code = self._processes[rank.number].wait()
                rank.ended = time.monotonic()
                break
            if isinstance(told, Message):
                rank.messages.append(told)
            else:
                rank.code = told
                rank.ended = time.monotonic()
        return rank.code is not None
