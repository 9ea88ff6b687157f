"""Links that are dead in a direction though both ranks live: one warning for each peer."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import IntEnum
from typing import Final

from .failures import RDMA_SILENT, UDP_SILENT, Where
from .reports import PeerStats

log: Final = logging.getLogger("lossycoll")


class Silence(IntEnum):
    """lc_silence."""

    HEARD = 0
    FROM = 1
    """Nothing comes from the peer."""
    TO = 2
    """The peer says that nothing comes to it."""
    NO_DATA = 3
    """Control comes from the peer, and none of its data."""


def sentence(peer: PeerStats, where: Where) -> str:
    """Describe the dead link between the rank of ``where`` and ``peer``, with a remedy."""
    who = where.peer(peer.rank)
    remedy = RDMA_SILENT if "(RDMA " in who else UDP_SILENT
    seconds = f"{peer.silent_ns / 1e9:.3g} s"
    seen = f"{peer.packets_received} packets came from it before"
    if peer.silence == Silence.TO:
        what = (
            f"{who} hears nothing of this rank, though its own packets come here: none of "
            f"{peer.silent_packets} datagrams that were sent to it in {seconds} has arrived"
        )
    elif peer.silence == Silence.NO_DATA:
        what = (
            f"only control comes from {who}: of {peer.silent_packets} packets of data that it sent "
            f"in {seconds} none has arrived; {seen}"
        )
        remedy = (
            "does a firewall or an interface drop large packets (a smaller LOSSYCOLL_MTU helps), "
            "or is LOSSYCOLL_INJECT set?"
        )
    else:
        what = (
            f"nothing comes from {who}, though it isn't lost: no packet for {seconds}, and no "
            f"answer to {peer.silent_packets} datagrams; {seen}"
        )
    return (
        f"{where}: {what}. Lossy calls continue without what is missing, and reliable ones end "
        f"with LinkError. Repair the link: {remedy}"
    )


class SilenceLog:
    """Logs once for each peer and kind of silence, and once that the peer is heard again.

    Where one kind follows another, it is logged when it is seen twice: while a link heals, what
    the peer said last is older than the packets that pass again.
    """

    def __init__(self) -> None:
        self._told: set[tuple[int, int]] = set()
        self._silent: dict[int, int] = {}
        """The kind of silence that was last seen of each silent peer."""

    def tell(self, peers: Iterable[PeerStats], where: Where) -> None:
        """Logs what has changed since the last call."""
        for peer in peers:
            if not peer.silence:
                if self._silent.pop(peer.rank, None):
                    log.info("%s: packets pass to and from %s again", where, where.peer(peer.rank))
                continue
            before = self._silent.get(peer.rank, peer.silence)
            self._silent[peer.rank] = peer.silence
            if peer.silence == before and (peer.rank, peer.silence) not in self._told:
                self._told.add((peer.rank, peer.silence))
                log.warning("%s", sentence(peer, where))
