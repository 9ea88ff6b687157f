"""Log of the recovery from loss on the path to each peer: a sentence at each change."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from lossycoll.plan.sets import code_of

from .failures import Where
from .reports import PeerStats

log: Final = logging.getLogger("lossycoll")

PERIOD_SECONDS, MOST_SECONDS = 10.0, 3600.0
"""The least between two lines about one peer: at first, and after many, as each line doubles it."""
SLACK: Final = 1.25
"""A choice that expects up to so many times what may be missing is as good as one that keeps it."""


def sentence(peer: PeerStats, where: Where) -> str:
    """What the rank of ``where`` logs of what it does against loss on the way to ``peer``."""
    means = _parity(peer.code)
    if peer.rounds:
        means += f", lost packets resent {_times(peer.rounds)}"
    text = (
        f"{where}: to {where.peer(peer.rank)} {peer.link_loss:.2%} of packets are lost, in runs of "
        f"{peer.link_burst:.2g}: {means}; {peer.expected_missing:.2%} expected missing, "
        f"{peer.max_missing:.2%} allowed"
    )
    if is_missed(peer):
        text += ", which can't be kept: raise max_missing, or set repair or delivery=reliable"
    return text


def is_missed(peer: PeerStats) -> bool:
    """Whether more is expected to be missing than may be."""
    return peer.expected_missing > SLACK * peer.max_missing


def _parity(code: int) -> str:
    if not code:
        return "no parity"
    found = code_of(code)
    return f"{found.rows} parity packets for {found.size} ({found.rows / found.size:.0%} more)"


def _times(rounds: int) -> str:
    return "once" if rounds == 1 else f"{rounds} times"


class RecoveryLog:
    """Logs the means of each peer once they are other ones, and not too often.

    ``clock``: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[int, tuple[tuple[int, int, bool], float, float]] = {}
        """By peer: means, when a line is due at the earliest, and how long the next one then is."""

    def tell(self, peers: Iterable[PeerStats], where: Where) -> None:
        """Logs what has changed; nothing of a peer for which nothing has to be done."""
        for peer in peers:
            means = (peer.code, peer.rounds, is_missed(peer))
            before, due, wait = self._told.get(peer.rank, ((0, 0, False), -1.0, PERIOD_SECONDS))
            now = self._clock()
            if peer.max_missing < 0 or means == before or now < due:
                continue
            self._told[peer.rank] = (means, now + wait, min(2 * wait, MOST_SECONDS))
            level = logging.WARNING if is_missed(peer) else logging.INFO
            log.log(level, "%s", sentence(peer, where))
