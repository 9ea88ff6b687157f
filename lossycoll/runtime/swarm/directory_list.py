"""Directory list of a peer: the order in which it tries directories at failover. All peers have it
in common, so that they find the same one."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from lossycoll.runtime.control.schema import Address

AGAIN_SECONDS: Final = 0.5  # between two passes over the list
STANDING_TRIES: Final = 20  # tries of half a second for a standby directory: its lease
BEGIN_SECONDS: Final = 8.0
"""Time before a swarm is begun: one that continues elsewhere asks former directories more often
(:data:`partition_merge.ASK_SECONDS`)."""
LOOPBACK: Final = ("127.0.0.1", "::1")
MOST_HEARD: Final = 24
MOST_SERVED: Final = 8


@dataclass(frozen=True, slots=True)
class Begin:
    """Right of a peer that listens to begin a swarm, if nobody whom it was told to join has one.
    ``at``: its own directory, as it reaches it; ``known_as``: as the others name it. ``opens``: has
    the directory take peers; the client's thread calls it, maybe more than once."""

    at: Address
    known_as: Address
    opens: Callable[[], None]


def _rank(place: Address) -> tuple[int, bytes, int]:
    """Position in the order in which peers may begin a swarm: all sort alike."""
    address = ipaddress.ip_address(place[0].partition("%")[0])
    return address.version, address.packed, place[1]


def next_pass(before: float, now: float) -> float:
    """Time of a peer's next pass, without its delay. ``before``: that of the one that ends now, or
    when its directory was lost. All peers that lose one at the same time keep step, so that none
    opens its own before one that is earlier in the list."""
    return max(before + AGAIN_SECONDS, now + AGAIN_SECONDS / 4)


def delay(drawn: float) -> float:
    """Delay of a pass: thousands don't come at the same time. ``drawn``: at random, 0 to 1."""
    return AGAIN_SECONDS / 2 * drawn


class DirectoryList:
    """Ordered list of directories of one peer. ``places``: the connected one first, then the others
    in the order in which they are tried. ``first``: whom it was told to ask when it was started."""

    def __init__(self, first: Sequence[Address], begin: Begin | None = None) -> None:
        self._first = list(first)
        self.places = list(first)
        self._heard: dict[Address, None] = {}
        """Addresses of present, past or possible directories, latest news last."""
        self._served: dict[Address, None] = {}  # directories that this peer was with
        self._own: Address | None = None
        self._opens: Callable[[], None] = lambda: None
        self._begin = begin  # None: it has been in a swarm, or doesn't listen
        self.tries = 0  # number of passes over all since this peer was with one

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
        if serves:
            self._begin = None
        known = list(dict.fromkeys(places))
        _remember(self._heard, known[::-1], MOST_HEARD)
        _remember(self._served, known[:serves], MOST_SERVED)
        rest = dict.fromkeys([*self._first, *reversed(self.heard)])
        self.places = known + [one for one in rest if one not in known]

    def prefer(self, *first: Address) -> None:
        self.places = [*first, *(one for one in self.places if one not in first)]

    @property
    def seeks(self) -> bool:
        """True if several places may have the swarm that it is to join, or it may begin one."""
        return self._begin is not None or len(self.places) > 1

    def may_begin(self, alive: Collection[Address], waited: float) -> bool:
        """Begin a swarm in place of one to join, if this peer is the first to, of those that listen
        and are alive. ``waited``: seconds for which all were asked. Returns whether it is."""
        begin = self._begin
        if begin is None or waited < BEGIN_SECONDS:
            return False
        own = _rank(begin.known_as)
        # Its own directory is alive as well, by an address that nobody else ranks it by.
        if any(one in alive and one != begin.at and _rank(one) < own for one in self._first):
            return False
        begin.opens()
        return True

    def is_next(self, place: Address, at: int, *, standby: bool) -> bool:
        """True if ``place``, number ``at`` of the list, may be tried. This peer's own comes after
        enough passes, and trying it opens its directory: so few directories open at once.
        ``standby``: one before it has said that it stands by. RendezvousError: its own can't be
        opened."""
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
