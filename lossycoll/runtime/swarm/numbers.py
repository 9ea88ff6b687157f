"""Numbers of peers: each is one peer's, and stays free for a while when that has gone."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Final

from .protocol import PLACES

KEPT_SECONDS: Final = 60.0
"""For which a peer that was lost finds its number free when it comes again."""


class Numbers:
    """Of a directory.

    Args:
        clock: In seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free = list(range(PLACES))
        """In their order."""
        self._former: dict[int, tuple[str, float]] = {}
        """Whose the numbers were of peers that have gone, and until when they aren't given away."""

    def take(self, wanted: int, name: str, draw: int | None) -> int:
        """A number for a peer that comes. There is one.

        Args:
            wanted: Which it had; PLACES: none.
            name: The peer's.
            draw: Says which it gets if that is another's by now; None: the lowest.
        """
        at = bisect.bisect_left(self._free, wanted)
        if at == len(self._free) or self._free[at] != wanted:
            at = self._another(name, draw)
        return self._free.pop(at)

    def _another(self, name: str, draw: int | None) -> int:
        now = self._clock()

        def is_kept(number: int) -> bool:
            former, until = self._former.get(number, (name, now))
            return now < until and former != name

        if draw is None:
            return next((at for at, one in enumerate(self._free) if not is_kept(one)), 0)
        found = [at for at, one in enumerate(self._free) if not is_kept(one)]
        return found[draw % len(found)] if found else draw % len(self._free)

    def give_back(self, number: int, name: str) -> None:
        """A peer has gone."""
        self._former[number] = name, self._clock() + KEPT_SECONDS
        bisect.insort(self._free, number)
