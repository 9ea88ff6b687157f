"""Whom peers turn to when their directory has gone: the same for all, however many may serve."""

from __future__ import annotations

import bisect

from .peer import Peer
from .protocol import MOST_DIRECTORIES
from .whereabouts import Place


class Successors:
    """Those peers of a directory that may serve."""

    def __init__(self) -> None:
        self._serve: list[tuple[int, int, Peer]] = []
        """Those that listen, in the order in which they came."""
        self._spare: list[tuple[int, int, Peer]] = []
        """Those that would, in order of their numbers."""

    def serves(self, peer: Peer, place: Place) -> None:
        """A peer has a directory of its own."""
        if peer.serves is None:
            bisect.insort(self._serve, (peer.came, peer.number, peer))
            self._drop(self._spare, peer.number, peer)
        peer.serves = place

    def spare(self, peer: Peer, place: Place) -> None:
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

    def listed(self) -> tuple[Place, ...]:
        """Whom to turn to in turn."""
        serve = [one.serves for _, _, one in self._serve[:MOST_DIRECTORIES]]
        spare = [one.spare for _, _, one in self._spare[: MOST_DIRECTORIES - len(serve)]]
        return tuple(place for place in (*serve, *spare) if place is not None)
