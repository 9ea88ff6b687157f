"""Stats of all groups of a process as one: sums, with ranks numbered as in the job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple

from lossycoll.runtime.engine.reports import EngineStats, PeerStats, Stats

OF_THE_SOCKET: Final = (
    *("malformed", "foreign", "forged", "replayed", "stale"),
    *("socket_overflow", "fast_path_refusals", "send_failures", "send_calls", "receive_calls"),
    *("control_sent", "control_received", "control_foreign"),
)
"""Counters that each group of a socket has, though they belong to all of them."""
SUMMED: Final = (
    *(each.name for each in fields(EngineStats) if each.name not in OF_THE_SOCKET),
    "calls",
)
OF_A_PEER: Final = (
    *("packets_sent", "packets_received", "packets_missing"),
    *("offered", "delivered"),
)
"""Counters of what passed between this rank and a peer; the rest describes the path."""


class Counted(NamedTuple):
    """Stats of one group.

    Attributes:
        stats: The figures.
        ranks: The numbers that the group's ranks have in the job.
        socket: The same object for groups that send by one socket.
    """

    stats: Stats
    ranks: Sequence[int]
    socket: object


def total(counted: Sequence[Counted], rank: int, world: int) -> Stats:
    """The sums of all groups."""
    sums: dict[str, Any] = {
        name: sum(getattr(each.stats, name) for each in counted) for name in SUMMED
    }
    sockets: defaultdict[int, list[Stats]] = defaultdict(list)
    for each in counted:
        sockets[id(each.socket)].append(each.stats)
    for name in OF_THE_SOCKET:
        sums[name] = sum(max(getattr(one, name) for one in of) for of in sockets.values())
    peers: defaultdict[int, list[PeerStats]] = defaultdict(list)
    for each in counted:
        for peer in each.stats.peers:
            peers[each.ranks[peer.rank]].append(peer)
    lost = {each.ranks[one] for each in counted for one in each.stats.lost}
    return Stats(
        **sums,
        rank=rank,
        world=world,
        lost=tuple(sorted(lost)),
        peers=tuple(_peer(one, peers[one]) for one in range(world)) if peers else (),
        groups=tuple(each.stats for each in counted),
    )


def _peer(rank: int, found: Iterable[PeerStats]) -> PeerStats:
    """One rank as all groups have it; its path as the group has it that has used it most."""
    known = sorted(found, key=lambda peer: peer.packets_sent + peer.packets_received)
    if not known:
        return PeerStats(rank, "", 0, 0, 0, rtt_ns=0, deadline_ns=0, delivery_rate=1.0)
    if len(known) == 1:
        return replace(known[0], rank=rank)
    sums: dict[str, Any] = {name: sum(getattr(peer, name) for peer in known) for name in OF_A_PEER}
    expected = sums["packets_received"] + sums["packets_missing"]
    rate = sums["packets_received"] / expected if expected else 1.0
    return replace(known[-1], rank=rank, **sums, delivery_rate=rate)
