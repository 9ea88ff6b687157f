"""The table: networks, what is done on them, and what the engine is to reach.

A sensible sample of hosts x rates x round trips x queues x losses x policers x jitter x changes x
pauses x sizes, not their product: each row stands for a kind of network, or for a way to fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.common.results import Piece
from lossycoll.lab.network import Link, Network, Port

LAN = Link(delay_ms=0.1)
SETTLE = 2
"""Calls after the first, or after a change, that don't count."""


@dataclass(frozen=True)
class Case(Piece):
    """One network, some all-reduces in a row, and the goal."""

    kind: str  # what it stands for: goals are by kind
    hosts: int  # how many there are, each with ``ranks`` ranks
    mbit: float  # rate of each host's port, both ways
    rtt_ms: float  # round trip
    mib: float  # size of the tensor
    ranks: int = 1
    # that the hosts are at, with ``lan_mbit`` to each host: ``mbit`` is then a site's own rate to
    # the others, which its hosts share, with the queue or policer
    sites: int = 1
    lan_mbit: float = 1000.0
    queue_ms: float = 25.0  # of the queues before ports; 0: a policer is there instead,
    policer_ms: float = 0.0  # with so much of its rate at once
    loss: float = 0.0  # share of packets that the network loses, in runs of ``burst``
    burst: float = 1.0
    jitter_ms: float = 0.0  # how far the delay wanders; ``spread_ms``: the same, packet by packet
    spread_ms: float = 0.0
    reorder: float = 0.0  # share of packets that come 5 ms late
    up_mbit: float = 0.0  # the rate from hosts to the network, where it differs; 0: it doesn't
    gap_s: float = 0.0  # pause between calls
    # what happens at 0.4 of the limit in the third call, and after a comma in the sixth: "" for
    # nothing, else as in ``rate=0.1``, ``rtt=200``, ``policer=10``, ``loss=0.05``; ``death``: the
    # last host's, as the third call begins
    change: str = ""
    tcp: str = ""  # flows beside the calls, as of ``lossycoll lab --tcp``
    # the option; ``repair``, ``fec``, ``max_missing`` (0: none) and ``algorithm`` are, too
    delivery: str = "lossy"
    repair: int = 0
    fec: float = 0.0
    max_missing: float = 0.0
    algorithm: str = "auto"
    collective: str = "all_reduce"  # whose largest buffer has ``mib``
    sealed: bool = False
    calls: int = 5  # how many count
    seed: int = 3

    @property
    def goal(self) -> Goal:
        """What is to be reached."""
        return GOALS[self.kind]

    @property
    def work(self) -> float:
        """About how many packets it takes, in millions."""
        calls = self.calls + SETTLE + (SETTLE + 1) * len(self.later)
        return calls * 2 * (self.hosts - 1) * self.ranks * self.mib * (1 << 20) / 1408e6

    @property
    def network(self) -> Network:
        """As the laboratory would be told."""
        port = Port(
            up_mbit=self.up_mbit or self.mbit,
            down_mbit=self.mbit,
            queue_ms=None if self.policer_ms else self.queue_ms,
            policer_ms=self.policer_ms or None,
        )
        link = Link(
            loss=self.loss,
            burst=self.burst,
            delay_ms=self.rtt_ms / 2,
            jitter_ms=min(self.jitter_ms, self.rtt_ms) / 2,
            spread_ms=self.spread_ms,
            reorder=self.reorder,
            hold_ms=5.0,
        )
        if self.sites == 1:
            return Network(hosts=2, link=link, port=port, seed=self.seed)
        return Network(
            sites=self.sites,
            hosts=self.hosts // self.sites,
            link=LAN,
            port=Port(up_mbit=self.lan_mbit, down_mbit=self.lan_mbit),
            wan=link,
            gateway=port,
            seed=self.seed,
        )

    @property
    def later(self) -> list[Case]:
        """What it is like after each change."""
        out: list[Case] = []
        for change in self.change.split(",") if self.change else ():
            out.append((out[-1] if out else self)._after(change))
        return out

    def _after(self, change: str) -> Case:
        name, _, value = change.partition("=")
        number = float(value or 0)
        if name == "death":
            return replace(self, hosts=self.hosts - 1, change="")
        if name == "rate":
            up = self.up_mbit * number
            return replace(self, mbit=self.mbit * number, up_mbit=up, change="")
        if name == "rtt":
            return replace(self, rtt_ms=number, change="")
        if name == "policer":
            return replace(self, policer_ms=number, change="")
        if name == "loss":
            return replace(self, loss=number, change="")
        raise KeyError(name)


@dataclass(frozen=True)
class Goal:
    """Bounds of medians. None: no bound."""

    ratio: float | None = None  # time over the limit, at most
    missing: float | None = None  # share of packets beyond those that the network loses, at most
    spread: float | None = None  # of a host's paths at half of the limit, at most
    # shares of the busiest port that TCP uses: of the job at least and at most, and TCP's at least
    job: tuple[float, float] | None = None
    tcp: float | None = None


GOALS = {
    "clean": Goal(1.12, 0.001, 1.1),
    "loss": Goal(1.15, 0.005),
    "parity": Goal(1.15 * 1.1, 0.005),  # a tenth of what travels; nothing is to be missing
    "parity alone": Goal(1.15 * 1.6, 0.005),  # at most 1.6 times the bytes at 20%
    "policer": Goal(1 / 0.9, 0.03),
    "change": Goal(1.15, 0.005),
    "change to policer": Goal(1 / 0.9, 0.03),
    "jitter": Goal(1.5, 0.005),
    "jitter above": Goal(2.5, 0.01),
    "reorder": Goal(1.5, 0.01),
    "small": Goal(None, 0.005),
    "slow": Goal(1.5, 0.005),
    "reliable": Goal(1.25, 0.0),
    "hosts of several": Goal(1.2, 0.001),
    "asymmetric": Goal(1.15, 0.005),
    "sites": Goal(1.15, 0.005),
    "tcp": Goal(job=(0.2, 0.6), tcp=0.2),
}
"""By kind; docs/congestion-results.md says where they come from."""


def cases() -> Iterator[Case]:
    """All of them, the most telling first."""
    yield from _clean()
    yield from _loss()
    yield from _policed()
    yield from _changes()
    yield from _uneven()
    yield from _sites()
    yield from _beside_tcp()
    yield from _other()


def sample() -> list[Case]:
    """Those for the short suite: seconds, not minutes."""
    return [
        Case("clean", 2, 100, 20, 4, calls=3),
        Case("clean", 4, 100, 20, 4, calls=3),
        Case("loss", 4, 100, 20, 4, loss=0.01, calls=3),
        Case("policer", 2, 100, 20, 4, policer_ms=10, calls=3),
        Case("sites", 4, 200, 20, 8, sites=2, calls=3),
        Case("loss", 4, 100, 20, 4, loss=0.01, repair=1, calls=3),
        Case("clean", 2, 1000, 1, 25, calls=3),
        Case("clean", 2, 10_000, 0.2, 100, queue_ms=5, calls=3),
        Case("slow", 4, 1, 30, 0.25, queue_ms=200, calls=3),
    ]


def _clean() -> Iterator[Case]:
    for hosts, mbit, rtt, mib in (
        (2, 20, 20, 4),
        (2, 1000, 1, 25),
        (4, 20, 20, 4),
        (4, 50, 20, 4),
        (4, 100, 20, 4),
        (4, 200, 20, 8),
        (4, 1000, 2, 25),
        (8, 20, 20, 4),
        (8, 50, 20, 4),
        (8, 100, 20, 8),
        (8, 1000, 2, 25),
        (3, 20, 20, 4),
        (16, 20, 20, 4),
        (16, 100, 20, 8),
        (32, 100, 20, 8),
        (64, 100, 20, 8),
    ):
        yield Case("clean", hosts, mbit, rtt, mib)
    for queue in (1, 5, 10, 100):
        yield Case("clean", 4, 100, 20, 4, queue_ms=queue)
        yield Case("clean", 8, 100, 2, 8, queue_ms=queue)
    for rtt_ms in (0.2, 2, 80, 200):
        yield Case("clean", 4, 100, rtt_ms, 8)
        yield Case("clean", 8, 100, rtt_ms, 8)
    for gap in (0.005, 0.3, 10):
        yield Case("clean", 4, 100, 20, 4, gap_s=gap)
        yield Case("clean", 8, 100, 20, 4, gap_s=gap)
    for hosts in (2, 4, 8):
        yield Case("clean", hosts, 100, 20, 25)
    for gap in (0.3, 10):
        yield Case("clean", 2, 100, 20, 4, gap_s=gap)
    yield Case("clean", 2, 10_000, 0.2, 100, queue_ms=5, calls=3)
    yield Case("clean", 4, 10_000, 0.2, 100, queue_ms=5, calls=3)
    yield Case("clean", 4, 1000, 20, 100, calls=3)


def _loss() -> Iterator[Case]:
    for loss in (0.001, 0.01, 0.05, 0.1):
        for hosts in (2, 4, 8):
            yield Case("loss", hosts, 100, 20, 4, loss=loss)
    for loss, hosts in ((0.01, 4), (0.1, 2), (0.1, 4), (0.1, 8)):
        yield Case("loss", hosts, 100, 20, 4, loss=loss, burst=8)
    for gap in (0.3, 10):
        for hosts in (2, 4, 8):
            yield Case("loss", hosts, 100, 20, 4, loss=0.01, gap_s=gap)
    yield Case("loss", 8, 1000, 20, 25, loss=0.01)
    yield Case("loss", 4, 1000, 80, 25, loss=0.01)
    yield Case("loss", 8, 20, 40, 4, loss=0.02)
    yield Case("loss", 16, 100, 20, 8, loss=0.01)
    yield Case("loss", 4, 100, 200, 8, loss=0.01)


def _policed() -> Iterator[Case]:
    for policer in (2, 5, 10, 25, 100):
        for hosts in (2, 4, 8):
            yield Case("policer", hosts, 100, 20, 4, policer_ms=policer)
    yield Case("policer", 2, 1000, 2, 25, policer_ms=10)
    yield Case("policer", 4, 1000, 2, 25, policer_ms=10)
    yield Case("policer", 4, 20, 20, 4, policer_ms=25)
    yield Case("policer", 4, 100, 20, 4, policer_ms=10, loss=0.01)
    yield Case("policer", 4, 100, 20, 4, policer_ms=10, gap_s=1.0)
    yield Case("policer", 16, 100, 20, 8, policer_ms=10)


def _sites() -> Iterator[Case]:
    for hosts in (2, 4, 8, 16):
        yield Case("sites", hosts, 200, 20, 8, sites=2)
    for hosts, sites in ((4, 4), (8, 4)):
        yield Case("sites", hosts, 200, 20, 8, sites=sites)
    for mbit, rtt, mib in ((100, 20, 8), (1000, 20, 25), (1000, 80, 25), (200, 80, 8), (200, 5, 8)):
        yield Case("sites", 4, mbit, rtt, mib, sites=2)
    for ranks in (2, 4):
        yield Case("sites", 4, 200, 20, 8, ranks=ranks, sites=2)
    yield Case("sites", 4, 200, 20, 8, sites=2, loss=0.01)
    yield Case("sites", 8, 200, 20, 8, sites=2, policer_ms=10)
    yield Case("sites", 4, 200, 20, 8, sites=2, queue_ms=5)
    yield Case("sites", 4, 200, 20, 8, sites=2, gap_s=0.3)
    yield Case("sites", 4, 200, 20, 8, sites=2, algorithm="transpose")


def _beside_tcp() -> Iterator[Case]:
    for hosts in (2, 4, 8):
        yield Case("tcp", hosts, 100, 20, 25, tcp="cubic")
        yield Case("tcp", hosts, 100, 20, 25, tcp=f"cubic:{hosts}")
    yield Case("tcp", 4, 100, 20, 25, tcp="reno")


def _changes() -> Iterator[Case]:
    for hosts in (2, 4, 8):
        yield Case("change", hosts, 100, 20, 4, change="rate=0.1")
        yield Case("change", hosts, 100, 20, 4, change="rate=10")
        yield Case("change", hosts, 100, 5, 4, change="rtt=200")
        yield Case("change", hosts, 100, 200, 4, change="rtt=5")
        yield Case("change to policer", hosts, 100, 20, 4, change="policer=10")
    yield Case("change", 4, 100, 20, 4, change="loss=0.05")
    yield Case("change", 16, 100, 20, 8, change="rate=0.1")
    for hosts in (2, 4, 8):
        yield Case("change", hosts, 100, 5, 4, change="rtt=200,rtt=5")
        yield Case("change", hosts, 100, 20, 4, change="policer=10,policer=0")
    for hosts in (4, 8):
        yield Case("change", hosts, 100, 20, 4, change="death")


def _uneven() -> Iterator[Case]:
    for hosts in (2, 4, 8):
        yield Case("jitter", hosts, 100, 20, 4, jitter_ms=10)
        yield Case("jitter", hosts, 100, 20, 4, spread_ms=5)
        yield Case("jitter", hosts, 100, 20, 4, spread_ms=20)
        yield Case("jitter above", hosts, 100, 20, 4, spread_ms=50)
        yield Case("reorder", hosts, 100, 20, 4, reorder=0.05)
    for hosts in (2, 4):
        yield Case("asymmetric", hosts, 100, 20, 1, up_mbit=10)
        yield Case("asymmetric", hosts, 1000, 20, 1, up_mbit=10)


def _other() -> Iterator[Case]:
    for hosts in (2, 4, 8, 16):
        yield Case("small", hosts, 100, 20, 1 / 16)
        yield Case("small", hosts, 1000, 0.2, 1)
    for hosts, mbit, mib in ((4, 1, 0.25), (8, 2, 1), (8, 5, 1)):
        yield Case("slow", hosts, mbit, 30, mib, queue_ms=200)
    yield Case("slow", 4, 2, 30, 1, queue_ms=200, loss=0.1, burst=8)
    for hosts in (2, 4, 8):
        yield Case("reliable", hosts, 100, 20, 4, delivery="reliable")
        yield Case("reliable", hosts, 100, 20, 4, delivery="reliable", loss=0.01)
        yield Case("loss", hosts, 100, 20, 4, loss=0.01, repair=1)
        yield Case("clean", hosts, 100, 20, 4, algorithm="ring")
        yield Case("parity", hosts, 100, 20, 4, loss=0.01, fec=0.1)
    yield Case("parity alone", 2, 100, 20, 1, max_missing=0.01, policer_ms=10, calls=10)
    for loss, burst in ((0.0, 1), (0.2, 1), (0.2, 8)):
        for hosts in (4, 8):
            yield Case("parity alone", hosts, 100, 20, 4, max_missing=0.01, loss=loss, burst=burst)
    for hosts in (4, 8):
        for collective in ("all_gather", "reduce_scatter", "broadcast", "all_to_all"):
            yield Case("clean", hosts, 100, 20, 8, collective=collective)
        yield Case("clean", hosts, 100, 20, 4, sealed=True)
    yield Case("loss", 4, 100, 20, 4, loss=0.01, sealed=True)
    for hosts, ranks in ((2, 2), (2, 8), (4, 4), (8, 4)):
        yield Case("hosts of several", hosts, 100, 20, 8, ranks=ranks)
