"""Bookkeeping tables of a directory: dirty queue, id allocator, standby directories, donors."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable
from typing import Final

from lossycoll.runtime.control.schema import Address

from .peer import Peer
from .placement import GridRow
from .protocol import MOST_DIRECTORIES, MOST_MEMBERS, MOST_PEERS
from .unreachable import UnreachablePairs

KEPT_SECONDS: Final = 60.0
"""For which a peer that was lost finds its number free when it comes again."""


class DirtyQueue:
    """Queue of grid rows whose groups may have become complete."""

    def __init__(self) -> None:
        self._now: set[GridRow] = set()
        self._times: dict[GridRow, float] = {}
        self._queue: list[tuple[float, GridRow]] = []
        """All times, those that don't hold any more among them."""

    def mark(self, rows: Iterable[GridRow]) -> None:
        """Mark rows on which something has changed."""
        self._now.update(rows)

    def schedule(self, row: GridRow, at: float | None) -> None:
        """Schedule a row for ``at``, when time alone changes it; None: it doesn't."""
        if at is None:
            self._times.pop(row, None)
        elif self._times.get(row) != at:
            self._times[row] = at
            heapq.heappush(self._queue, (at, row))

    def take(self, now: float) -> list[GridRow]:
        """Remove and return the rows to look at now."""
        while self._queue and self._queue[0][0] <= now:
            at, row = heapq.heappop(self._queue)
            if self._times.get(row) == at:
                del self._times[row]
                self._now.add(row)
        found, self._now = sorted(self._now), set()
        return found

    def clear(self) -> None:
        """Forget all rows: the grid has changed."""
        self._now, self._times, self._queue = set(), {}, []

    @property
    def is_due(self) -> bool:
        """True if something has changed since the rows were looked at."""
        return bool(self._now)

    def wakes(self) -> float | None:
        """Time at which the next scheduled row is due; None: there is none."""
        while self._queue and self._times.get(self._queue[0][1]) != self._queue[0][0]:
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else None


class IdAllocator:
    """Allocator of peer numbers. The number of a lost peer stays free for a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free = list(range(MOST_PEERS))
        """In their order."""
        self._former: dict[int, tuple[str, float]] = {}
        """Whose the numbers were of peers that have gone, and until when they aren't given away."""

    def take(self, wanted: int, name: str, draw: int | None) -> int:
        """A number for a peer that comes. There is one. ``draw``: says which it gets if that is
        another's by now; None: the lowest."""
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


class StandbyDirectories:
    """Standby directories: peers that may serve when the directory in use has gone."""

    def __init__(self) -> None:
        self._serve: list[tuple[int, int, Peer]] = []
        """Peers that listen, in the order of their arrival."""
        self._spare: list[tuple[int, int, Peer]] = []
        """Peers that would open one, in order of their numbers."""

    def serves(self, peer: Peer, place: Address) -> None:
        """A peer has a directory of its own."""
        if peer.serves is None:
            bisect.insort(self._serve, (peer.came, peer.number, peer))
            self._drop(self._spare, peer.number, peer)
        peer.serves = place

    def spare(self, peer: Peer, place: Address) -> None:
        """A peer opens one there if all others have gone."""
        if peer.spare is None and peer.serves is None:
            bisect.insort(self._spare, (peer.number, peer.number, peer))
        peer.spare = place

    def lost(self, peer: Peer) -> None:
        """A peer has gone."""
        self._drop(self._serve, peer.came, peer)
        self._drop(self._spare, peer.number, peer)

    def _drop(self, among: list[tuple[int, int, Peer]], key: int, peer: Peer) -> None:
        at = bisect.bisect_left(among, (key, peer.number))
        if at < len(among) and among[at][2] is peer:
            del among[at]

    def listed(self) -> tuple[Address, ...]:
        """Return the directory list."""
        serve = [one.serves for _, _, one in self._serve[:MOST_DIRECTORIES]]
        spare = [one.spare for _, _, one in self._spare[: MOST_DIRECTORIES - len(serve)]]
        return tuple(place for place in (*serve, *spare) if place is not None)


class Donors:
    """Peers that have a state for newcomers, and the joiners that seek one. ``unreachable``: pairs
    that can't reach each other."""

    def __init__(self, unreachable: UnreachablePairs) -> None:
        self._unreachable = unreachable
        self._offer: dict[int, Peer] = {}
        self._seek: dict[int, tuple[Peer, int]] = {}

    def offers(self, peer: Peer, has: bool) -> None:
        """Note that a peer offers a state for newcomers, or no longer does."""
        if has:
            self._offer[peer.number] = peer
        else:
            self._offer.pop(peer.number, None)

    def seeks(self, peer: Peer, donors: int) -> None:
        """A newcomer wants a state, of so many peers at most; of none, none any more."""
        self._seek[peer.number] = peer, min(donors, MOST_MEMBERS)

    def lost(self, number: int) -> None:
        """A peer has gone."""
        self._offer.pop(number, None)
        self._seek.pop(number, None)

    def asked(self) -> list[tuple[Peer, int]]:
        """Remove and return the joiners to answer, and how many donors each wants at most."""
        found = [(peer, most) for peer, most in self._seek.values() if not peer.told]
        for peer, _ in found:
            del self._seek[peer.number]
        return [(peer, most) for peer, most in found if most]

    def choose(self, joiner: Peer, most: int, draw: Callable[[int], int]) -> list[Peer]:
        """Choose the donors with the newest states, others each time, and note both ends as
        partners. ``draw``: of a number: who goes first of those that are equally far."""
        if joiner.place is None or not joiner.schema:
            return []
        found = [
            one
            for one in self._offer.values()
            if one is not joiner and one.place and one.schema == joiner.schema and not one.behind
        ]
        if self._unreachable.concerns([joiner.number]):
            found = [one for one in found if not self._unreachable(one.number, joiner.number)]
        chosen = heapq.nsmallest(
            most, found, key=lambda one: (-one.samples, -one.round, draw(one.number))
        )
        for one in chosen:
            one.partners.add(joiner.number)
        joiner.partners.update(one.number for one in chosen)
        return chosen
