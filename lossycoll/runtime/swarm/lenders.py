"""Who lends newcomers a state."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from .apart import Apart
from .peer import Peer
from .protocol import MOST_MEMBERS


class Lenders:
    """Of a directory.

    Args:
        apart: Pairs that can't reach each other.
    """

    def __init__(self, apart: Apart) -> None:
        self._apart = apart
        self._offer: dict[int, Peer] = {}
        self._seek: dict[int, tuple[Peer, int]] = {}

    def offers(self, peer: Peer, has: bool) -> None:
        """Whether a peer has a state for newcomers."""
        if has:
            self._offer[peer.number] = peer
        else:
            self._offer.pop(peer.number, None)

    def seeks(self, peer: Peer, lenders: int) -> None:
        """A newcomer wants a state, of so many peers at most; of none, none any more."""
        self._seek[peer.number] = peer, min(lenders, MOST_MEMBERS)

    def lost(self, number: int) -> None:
        """A peer has gone."""
        self._offer.pop(number, None)
        self._seek.pop(number, None)

    def asked(self) -> list[tuple[Peer, int]]:
        """Who is to be answered that seeks a state, and of how many; they are, then."""
        found = [(peer, most) for peer, most in self._seek.values() if not peer.told]
        for peer, _ in found:
            del self._seek[peer.number]
        return [(peer, most) for peer, most in found if most]

    def of(self, taker: Peer, most: int, draw: Callable[[int], int]) -> list[Peer]:
        """Those whose states are newest, others each time, and note whom they lend.

        Args:
            taker: The newcomer.
            most: So many at most.
            draw: Of a number: who goes first of those that are equally far.
        """
        if taker.place is None or not taker.schema:
            return []
        found = [
            one
            for one in self._offer.values()
            if one is not taker and one.place and one.schema == taker.schema and not one.behind
        ]
        if self._apart.concerns([taker.number]):
            found = [one for one in found if not self._apart(one.number, taker.number)]
        lent = heapq.nsmallest(
            most, found, key=lambda one: (-one.samples, -one.round, draw(one.number))
        )
        for one in lent:
            one.partners.add(taker.number)
        taker.partners.update(one.number for one in lent)
        return lent
