"""Directory list of a peer: the order in which it tries directories at failover. All peers have it
in common, so that they find the same one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from lossycoll.runtime.control.schema import Address

STANDING_TRIES: Final = 20
"""Of half a second, for which one that stands by is waited for: a lease."""
LOOPBACK: Final = ("127.0.0.1", "::1")
MOST_HEARD: Final = 24
MOST_SERVED: Final = 8


class DirectoryList:
    """Ordered list of directories of one peer. ``places``: the connected one first, then the others
    in the order in which they are tried. ``first``: whom it was told to ask when it was started."""

    def __init__(self, first: Sequence[Address]) -> None:
        self._first = list(first)
        self.places = list(first)
        self._heard: dict[Address, None] = {}
        """Where directories are, were or may be; the latest that were heard of last."""
        self._served: dict[Address, None] = {}
        """Those that this peer was with."""
        self._own: Address | None = None
        self._opens: Callable[[], None] = lambda: None
        self.tries = 0
        """How often all have been tried since this peer was with one."""

    @property
    def heard(self) -> tuple[Address, ...]:
        """Addresses at which directories are, were or may be: last those that this peer was
        with."""
        return (*(one for one in self._heard if one not in self._served), *self._served)

    def may_open(self, place: Address, opens: Callable[[], None]) -> None:
        """A directory of this peer itself is there, or will be when ``opens`` was called: no other
        place has its port on this machine's loopback."""
        self._own, self._opens = place, opens
        same = [(host, place[1]) for host in LOOPBACK if host != place[0]]
        self._first = [one for one in self._first if one not in same]
        self.places = [one for one in self.places if one not in same]

    def learn(self, places: Sequence[Address], *, serves: bool = False) -> None:
        """Others have said whom to turn to, in this order. What was known before comes after.
        ``serves``: this peer is with the first of them."""
        known = list(dict.fromkeys(places))
        _remember(self._heard, known[::-1], MOST_HEARD)
        _remember(self._served, known[:serves], MOST_SERVED)
        rest = dict.fromkeys([*self._first, *reversed(self.heard)])
        self.places = known + [one for one in rest if one not in known]

    def prefer(self, *first: Address) -> None:
        """These are to be tried before all others."""
        self.places = [*first, *(one for one in self.places if one not in first)]

    def is_next(self, place: Address, at: int, *, standby: bool) -> bool:
        """Whether a place may be tried. This peer's own, which that opens, is when the others have
        had their time: so as few directories as possible open at once.

        ``at``: the how manieth of them it is. ``standby``: one before it has said that it stands
        by. RendezvousError: its own can't be opened.
        """
        if place != self._own:
            return True
        # The first of all has just ended.
        if self.tries < max(at - 1, STANDING_TRIES * standby):
            return False
        self._opens()
        return True


def _remember(among: dict[Address, None], places: Sequence[Address], most: int) -> None:
    """The latest are last, and the first are forgotten."""
    for place in places:
        among.pop(place, None)
        among[place] = None
    for place in list(among)[: max(0, len(among) - most)]:
        del among[place]
