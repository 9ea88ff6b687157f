"""Samples that a directory's peers have seen: when a round is due by them, and whose state is older
than another's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from .peer import Peer
from .protocol import MOST_WEIGHT, Offers

MOST_SINCE: Final = 1 << 32
MOST_TARGETS: Final = 4
"""Targets that a peer's report counts at most. In a mean it counts one."""
MOST_SAMPLES: Final = 1 << 52


class Progress:
    """Progress of a directory's peers. ``samples``: that finished rounds have had. ``target``:
    samples after which a round is due; 0: whenever peers are ready."""

    def __init__(self) -> None:
        self.samples = 0
        self.target = 0
        self._since = 0
        """Samples that peers have reported since their latest rounds."""
        self._due_at = 0
        """All samples when a round was due last."""
        self._behind: dict[int, Peer] = {}

    @property
    def total(self) -> int:
        """All samples, those of unfinished rounds included."""
        return self.samples + self._since

    def report(self, peer: Peer, said: Offers, others: Iterable[Peer]) -> None:
        """A peer says how far it is. One that lies gains no more than the weight of a whole round.
        ``others``: all that have said what they average."""
        samples = min(said.samples, MOST_SAMPLES)
        if said.claims and not peer.came_back:
            self._claim(peer, samples, [one for one in others if one is not peer])
        elif peer.came_back:  # a directory that has taken over learns it from those that come
            self._go_on_from(max(self.samples, samples))
        if peer.behind and samples >= peer.behind:
            self._caught_up(peer)
        if samples < peer.samples:
            return  # said before it heard of its latest round
        peer.samples = min(samples, self.samples)
        since = min(said.since, MOST_TARGETS * self.target or MOST_SINCE)
        self._since += since - peer.since
        peer.since = since

    def _claim(self, peer: Peer, samples: int, others: Sequence[Peer]) -> None:
        """The newest state wins: those that have older ones are to take it."""
        newest = max((one.samples for one in others if not one.behind), default=0)
        if samples < newest:
            peer.behind, self._behind[peer.number] = newest, peer
            return
        self._go_on_from(samples)
        peer.samples = samples
        for one in others:
            if one.samples < samples:
                one.behind, self._behind[one.number] = samples, one

    def _go_on_from(self, samples: int) -> None:
        """These were seen before peers came here: no round is due by them."""
        self._due_at += samples - self.samples
        self.samples = samples

    def _caught_up(self, peer: Peer) -> None:
        peer.behind = 0
        self._behind.pop(peer.number, None)

    def told(self) -> list[Peer]:
        """Peers that are ready, and hear that another state is newer."""
        return [one for one in self._behind.values() if one.is_ready and not one.told]

    def falls_due(self) -> bool:
        """True if peers have seen the target since a round was due last. True once each time."""
        if not self.target or self.total - self._due_at < self.target:
            return False
        self._due_at = self.total
        return True

    def begin(self, peers: Sequence[Peer]) -> None:
        """A round of these peers begins. With a target each counts by its samples."""
        for peer in peers:
            if self.target and peer.weight:
                peer.weight = min(peer.since, self.target) * min(1.0, MOST_WEIGHT / self.target)
            self._since -= peer.since
            self.samples = min(self.samples + peer.since, MOST_SAMPLES)
            peer.since = 0
        for peer in peers:
            peer.samples = self.samples

    def lost(self, peer: Peer, others: Iterable[Peer]) -> None:
        """A peer has gone, and a newer state with it, maybe. ``others``: all that have said what
        they average, and are left."""
        self._since -= peer.since
        self._behind.pop(peer.number, None)
        if not self._behind:
            return
        left = list(others)
        wanted = min(one.behind for one in self._behind.values())
        if any(one.samples >= wanted and not one.behind for one in left):
            return
        for one in list(self._behind.values()):
            self._caught_up(one)
        self._go_on_from(max((one.samples for one in left), default=0))
