"""Ranks whose secrets differ can't read one another's words: how they find out all the same.

A rank that can't read the session marks a key of its own, named after what it can't read. Rank 0,
which wrote that, looks for such marks. Both are in clear, and nothing but an error comes of them:
whoever can write to the store can keep a job from starting in any case.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Final

from .polled_store import PolledStore

SESSION: Final = re.compile("[0-9a-f]{16}")
"""The session as a rank reads it."""
PATIENCE_SECONDS: Final = 2.0
"""Time for a process of the right secret after one of another, with the same rank."""


class DifferingSecrets:
    """One rank's view."""

    def __init__(
        self, store: PolledStore, rank: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._rank = rank
        self._clock = clock
        self._told = ""
        self._seen: dict[int, float] = {}

    @property
    def apart(self) -> set[int]:
        """For rank 0: the ranks that couldn't read the session at some time."""
        return set(self._seen)

    def tell(self) -> bool:
        """For a rank that can't read the session: marks it. Returns whether rank 0 has seen that,
        and so is there with another secret."""
        digest = self._store.anothers("session", SESSION.fullmatch)
        if digest is None:
            return False
        if digest != self._told:
            self._told = digest
            self._store.mark(f"differs/{digest}/{self._rank}")
        return self._store.is_marked(f"differs/{digest}/seen/{self._rank}")

    def found(self, digest: str, missing: Iterable[int]) -> int | None:
        """For rank 0: one of the ``missing`` ranks that couldn't read the session with this digest
        and hasn't come with the right secret since; None: there is none."""
        now = self._clock()
        for rank in missing:
            if not self._store.is_marked(f"differs/{digest}/{rank}"):
                continue
            if now - self._seen.setdefault(rank, now) >= PATIENCE_SECONDS:
                return rank
        return None

    def answer(self, digest: str, missing: Iterable[int]) -> None:
        """For rank 0 that refuses: whoever of the ``missing`` ranks couldn't read the session knows
        now that it was its."""
        for rank in missing:
            if rank in self._seen or self._store.is_marked(f"differs/{digest}/{rank}"):
                self._seen.setdefault(rank, self._clock())
                self._store.mark(f"differs/{digest}/seen/{rank}")
