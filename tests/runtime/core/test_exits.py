"""Threads that are inside torch when the interpreter ends."""

from __future__ import annotations

import threading

from lossycoll.runtime.core.exits import close_at_exit, start_thread
from tests.support.harness import note, run_ranks


def rank_ends_beside_threads_in_torch(rank: int, world: int) -> None:
    import torch

    stop, begun = threading.Event(), threading.Semaphore(0)

    def work() -> None:
        some, other = torch.ones(50_000), torch.empty(50_000)
        begun.release()
        while not stop.is_set():
            other.copy_(some)
        note("stopped")

    for number in range(3):
        start_thread(work, f"copies {number}", stop.set)
        begun.acquire()
    start_thread(lambda: None, "over by then")
    close_at_exit(lambda: note("closed"))


def test_threads_inside_torch_are_stopped_before_the_interpreter_ends() -> None:
    for outcome in run_ranks(rank_ends_beside_threads_in_torch, 4, {}):
        assert outcome.code == 0, outcome
        assert outcome.stderr.startswith("closed"), outcome
        assert outcome.stderr.count("stopped") == 3, outcome
