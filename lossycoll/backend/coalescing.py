"""Works that torch's coalescing manager wants as one."""

from __future__ import annotations

import threading

import torch.distributed as dist

from .work import LossyWork, ManyWork


class Coalescing(threading.local):
    """The works since the manager was opened, for each thread by itself.

    What another thread posts meanwhile isn't the manager's: leaving the manager would wait for it,
    and it might need what comes after.
    """

    def __init__(self) -> None:
        self._works: list[dist.Work] | None = None

    def begin(self) -> None:
        """From now on this thread's works are kept."""
        self._works = []

    def end(self) -> dist.Work:
        """One work for all of this thread since ``begin``."""
        works, self._works = self._works or [], None
        # Another backend's work tells its result when it is done.
        own = [work for work in works if isinstance(work, LossyWork)]
        return ManyWork(works, [tensor for work in own for tensor in work.result()])

    def add(self, work: dist.Work) -> dist.Work:
        """Every work goes through here; returns it."""
        if self._works is not None:
            self._works.append(work)
        return work
