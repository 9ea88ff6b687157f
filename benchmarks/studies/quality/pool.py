"""The ranks as processes that stay: starting torch once is what makes hundreds of runs cheap.

This is more than concurrent.futures has: a run goes to all ranks at once, and each to its own
process; where one fails or doesn't end in time the others, which wait for it, are killed at once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from torch._C._distributed_c10d import TCPStore

from benchmarks.common.runner import PieceFailed

from . import rank as rank_module
from .matrix import Run
from .variants import variants

RUN_SECONDS = 300.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo"}


class RunFailed(PieceFailed):
    """A rank raised an error, died or did not end in time. The pool's ranks are gone."""


@contextlib.contextmanager
def _environment_of_ranks() -> Iterator[None]:
    """What is started here inherits it; the runs say all they need, and nothing else may change
    them."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("LOSSYCOLL_")]:
        del os.environ[name]
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Pool:
    """``world`` ranks on this machine; a ``with`` block ends them."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._number = 0
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks: list[tuple[Any, Connection]] = []
        spawn = multiprocessing.get_context("spawn")
        with _environment_of_ranks():
            for rank in range(world):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(
                    target=rank_module.serve,
                    args=(rank, world, self._store.port, theirs),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._ranks.append((process, ours))

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, run: Run, steps: int | None = None) -> dict[str, Any]:
        """One run on all ranks. Raises RunFailed, after which the pool is of no more use."""
        method = variants().get(run.variant)
        if method is None:
            known = ", ".join(variants())
            raise RunFailed(f"{run.key}: no variant {run.variant!r}, wanted one of {known}")
        self._number += 1
        try:
            for _, pipe in self._ranks:
                pipe.send((self._number, run, method, steps))
            return self._collect(run)
        except (RunFailed, OSError) as error:
            self.close(at_once=True)
            raise RunFailed(str(error)) from None

    def _collect(self, run: Run) -> dict[str, Any]:
        results: dict[int, dict[str, Any]] = {}
        until = time.monotonic() + RUN_SECONDS
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while pipes:
            ready: list[Any] = wait(list(pipes), max(0.0, until - time.monotonic()))
            if not ready:
                raise RunFailed(f"{run.key}: ranks {sorted(pipes.values())} did not end in time")
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    found, error = pipe.recv()
                except EOFError:
                    raise RunFailed(f"{run.key}: rank {rank} died") from None
                if found is None:
                    raise RunFailed(f"{run.key}: rank {rank} failed\n{error}")
                results[rank] = found
        return results[0]

    def close(self, at_once: bool = False) -> None:
        """Ends the ranks."""
        for _, pipe in self._ranks:
            if not at_once:
                with contextlib.suppress(OSError):
                    pipe.send(None)
            pipe.close()
        for process, _ in self._ranks:
            process.join(0.0 if at_once else 20.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks = []
