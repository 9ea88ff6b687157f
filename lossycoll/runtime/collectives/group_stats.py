"""Counters of one rank, of a group and of all its groups, for its program and the other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple

from lossycoll.errors import ClosedError
from lossycoll.options.fields import Options
from lossycoll.options.ranges import is_whole
from lossycoll.runtime.core.logfmt import log
from lossycoll.runtime.engine.link_events import LinkLog, RecoveryLog, SilenceLog
from lossycoll.runtime.engine.reports import EngineStats, PeerStats, Report, Stats

from .group_context import GroupContext
from .operations import Operations

SHARED_STATS: Final = (
    "operations",
    "packets_sent",
    "packets_resent",
    "resent_reliable",
    "packets_received",
    "packets_recovered",
    "nan_groups",
    "packets_missing",
    "packets_injected",
    "socket_overflow",
    "bytes_sent",
    "deadline_hits",
    "operation_ns",
)
"""Counters that a rank sends to others that ask for them."""
SHARE_OF: Final = ("packets_missing", "packets_received", "missing_at_dead_links")


MISSING_SHARE, MISSING_PACKETS = 0.01, 100
"""More missing than both of these is said, where no method makes up for it."""
MAKES_UP: Final = (
    "keep DDP's replicas together by lossycoll.DriftBound(model, optimizer), or bring packets back "
    "by Options(max_missing='1%')"
)
OVERFLOW: Final = (
    "this rank's receive buffer was full; raise it (sysctl net.core.rmem_max, and "
    "LOSSYCOLL_SOCKET_BUFFER if that is set; for a port of RDMA, whose users are all counted, "
    "ulimit -l) or lower LOSSYCOLL_MTU"
)
STRANGERS: Final = (
    "or changed on their way, and dropped: somebody without the secret sends to this rank, or "
    "ranks of an earlier job still run"
)


class DeadLinks:
    """Counts packets ``missing`` since a link is dead, which no method against loss brings back.
    ``unsure``: those of the last look, of links that may prove to be dead at the next."""

    def __init__(self) -> None:
        self.missing = 0
        self.unsure = 0
        self._before: dict[int, tuple[int, int, bool]] = {}
        """By peer at the last look: packets missing, those of them that are unsure, and silence."""

    def look(self, peers: Iterable[PeerStats]) -> None:
        """Counts what has become missing since the last call."""
        self.unsure = 0
        for peer in peers:
            total, unsure, was_silent = self._before.get(peer.rank, (0, 0, False))
            grown, silent = peer.packets_missing - total, peer.silence > 0
            if silent or was_silent:
                self.missing += grown + unsure
                grown = 0
            self.unsure += grown
            self._before[peer.rank] = (peer.packets_missing, grown, silent)


class GroupStats:
    """Counters and warnings of one group."""

    def __init__(self, context: GroupContext, operations: Operations) -> None:
        self._health = context.health
        self._where = context.health.where
        self._engine = context.engine
        self._control = context.control
        self._operations = operations
        self._asked = not isinstance(context.options.max_missing, str)
        self.made_up_for = False
        """Whether a method has looked after what is missing, which then is as it should be."""
        self._said: set[str] = set()
        """Warnings that were given, each once per group."""
        self._promised: dict[Options, str] = {}
        self._at_promise: EngineStats | None = None
        self._link_log = LinkLog()
        self._recovery_log = RecoveryLog()
        self._silence_log = SilenceLog()
        self._dead_links = DeadLinks()

    def stats(self) -> Stats:
        """This rank's since the group was made."""
        around: dict[str, Any] = {
            "rank": self._where.rank,
            "world": self._where.world,
            "calls": self._health.seq + 1,
        }
        if self._engine is None or self._control is None:
            return Stats(**around)
        sums = self._engine.stats()
        return Stats(
            **{name: getattr(sums, name) for name in sums.__dataclass_fields__},
            **around,
            control_foreign=self._control.foreign,
            lost=self._operations.sequencer.latest.lost,
            peers=tuple(self.peer(rank) for rank in range(self._where.world)),
        )

    def peer(self, rank: int) -> PeerStats:
        """Counters of what was sent to and received from ``rank``."""
        assert self._engine is not None
        return self._engine.peer_stats(rank)

    def last_report(self) -> Report | None:
        """Report of the last operation that the engine ended here; None before the first."""
        if self._engine is None or not self._operations.any_ended:
            return None
        report = self._engine.last_report()
        return replace(report, lost=self._operations.sequencer.at(report.op).lost)

    def of_all_ranks(self) -> Mapping[int, Mapping[str, Any]]:
        """The counters of every rank, by rank, asked now; of one that is silent, its last."""
        others = self._control.group_stats() if self._control is not None else {}
        return dict(sorted({**others, self._where.rank: self.own()}.items()))

    def own(self) -> dict[str, Any]:
        """This rank's counters for the other ranks; also called by the control plane's thread."""
        out: dict[str, Any] = {"calls": self._health.seq + 1}
        if self._engine is not None:
            try:
                sums = self._engine.stats()
                self._link_log.tell(self._engine.event, self._where, self._claim)
                peers = [self.peer(rank) for rank in range(self._where.world)]
                self._recovery_log.tell(peers, self._where)
                self._silence_log.tell(peers, self._where)
                self._dead_links.look(peers)
            except ClosedError:
                return out
            self._warn(sums)
            out |= {name: getattr(sums, name) for name in SHARED_STATS}
            out["missing_at_dead_links"] = self._dead_links.missing
        return out

    def _warn(self, sums: EngineStats) -> None:
        """Warns once of each fault that the figures show; of much that is missing, by one rank of
        each machine."""
        at_dead_links = self._dead_links.missing + self._dead_links.unsure
        missing = sums.packets_missing, sums.packets_received, at_dead_links
        texts = {
            "missing": self._speaks() and self._missing("at this rank so far", *missing),
            "overflow": sums.socket_overflow
            and f"the kernel dropped {sums.socket_overflow} packets so far since {OVERFLOW}",
            "forged": sums.forged
            and f"{sums.forged} datagrams so far were sealed with another key, {STRANGERS}",
            "promise": self._broken_promise(sums),
        }
        for name, text in texts.items():
            if text and name not in self._said:
                self._said.add(name)
                log.warning("%s: %s", self._where, text)

    def _speaks(self) -> bool:
        """True if no lower rank of the group is on this machine, by its address."""
        machines = [address.rpartition(":")[0] for address in self._where.addresses]
        own = self._where.rank
        return not machines or machines[own] not in machines[:own]

    def _claim(self, what: str) -> bool:
        """As of Host.claim. Who claimed something may have left: then its machine has heard."""
        assert self._engine is not None
        return (not self._health.closed or self._speaks()) and self._engine.claim(what)

    def tell_missing(self) -> None:
        """At the group's end rank 0 says how much was missing at all ranks, if that is much."""
        if self._where.rank or self._control is None or self._engine is None:
            return
        known = [*self._control.last_stats().values(), self.own()]
        told = [[one.get(name) for one in known] for name in SHARE_OF]
        of_all = [sum(each for each in of if is_whole(each, 0)) for of in told]
        text = self._missing("at all ranks, now that the group ends", *of_all)
        if text:
            log.info("%s: %s", self._where, text)

    def _missing(self, at: str, missing: int, received: int, at_dead_links: int) -> str:
        """A sentence on so many missing packets; empty: none."""
        missing -= at_dead_links  # of which the link's own warning tells, with another remedy
        expected = missing + received
        few = missing < MISSING_PACKETS or missing <= MISSING_SHARE * expected
        if few or self._asked or self.made_up_for:
            return ""
        group = f"group {self._where.group}: " if self._where.group else ""
        return (
            f"{group}{missing / expected:.1%} of the packets were missing ({missing} of "
            f"{expected}) {at}, and nothing makes up for it: sums lack contributions, and DDP's "
            f"replicas drift apart; {MAKES_UP}"
        )

    def promise(self, options: Options, by: str) -> None:
        """A lossy call with these options is to give the same bits in each run."""
        if options in self._promised or self._engine is None:
            return
        if self._at_promise is None:
            self._at_promise = self._engine.stats()
        self._promised[options] = by

    def _broken_promise(self, sums: EngineStats) -> str:
        """A sentence on missing packets that aren't those that another run lacks; empty: none."""
        before, promised = self._at_promise, dict(self._promised)
        if before is None:
            return ""
        missing = sums.packets_missing - before.packets_missing
        late = sums.deadline_hits > before.deadline_hits
        by = next((by for one, by in promised.items() if missing and (late or _differs(one))), "")
        return by and (
            f"{by} can't be kept in lossy calls: {missing} packets are missing here so far, and in "
            "another run others will be. Sums are in the order of ranks, but of what came; "
            "delivery='reliable', or lossycoll.reliable() around a call, loses nothing (the page "
            "Engine reference)"
        )


def _differs(options: Options) -> bool:
    """True if what is missing, or what it does, differs between runs: it isn't a seed's alone."""
    measured = options.recovery[1] > 0 or options.chooses_rounds
    return not options.inject or measured or options.estimator == "inverse_probability"


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
    """Stats of one group."""

    stats: Stats  # The figures
    ranks: Sequence[int]  # The numbers that the group's ranks have in the job
    socket: object  # The same object for groups that send by one socket


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
