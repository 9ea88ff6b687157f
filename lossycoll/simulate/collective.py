"""What a collective takes on a network, by the engine itself in virtual time (docs/simulate.md)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..errors import OptionError
from ..lab.network import Network
from ..options.fields import Options
from ..plan import Topology, default_algorithm
from ..plan.codec import elements_of, phases
from ..runtime.collectives.endpoint import Endpoint
from ..runtime.core.call import Collective, Terms
from ..runtime.engine.binding import DType
from ..runtime.engine.failures import Code
from .hosts import (
    LONGEST_SECONDS,
    MOST_KNOWN,
    Counts,
    Hosts,
    crossing,
    planned_peers,
)

CAPACITY: Final = 16_384
"""Packets of a receive buffer: what the kernel gives who may ask for 32 MiB."""
GRAIN: Final = (10e-6, 100e-6)
"""How long a rank rests between two turns: a 200th of the round trip within these bounds, which are
those of busy and of idle kernels."""
MOST_RANKS: Final = 1024
SETTLE: Final = 2
"""Calls after which a group knows its network."""


@dataclass(frozen=True)
class Change:
    """Change to another network, from some time on."""

    call: int  # in this call, from 0
    after: float  # so many seconds after it began
    network: Network  # what it then is like


@dataclass(frozen=True)
class Call:
    """Outcome of one call."""

    seconds: float  # from its begin, which is that of all ranks, to the end of the last one
    # the bytes of the busiest port by its rate, headers not counted, and the ways that data goes
    # one after another. Who sends while packets are under way takes less than both.
    limit: float
    missing: float  # the share of packets that was given up, over all ranks
    resent: int  # packets that were sent again
    counts: Counts  # what the network did
    code: int  # the engine's, of the rank that failed first; 0: none did

    @property
    def ratio(self) -> float:
        """Its time over the limit."""
        return self.seconds / self.limit if self.limit else float("inf")


@dataclass(frozen=True)
class Simulated:
    """Outcome of some calls in a row."""

    calls: tuple[Call, ...]  # all of them
    settled: int  # how many of the first don't count for the figures below
    bound: str  # what the limit is of, in words

    @property
    def steady(self) -> tuple[Call, ...]:
        """The calls that count."""
        return self.calls[self.settled :]

    @property
    def seconds(self) -> float:
        """The median of their times."""
        return statistics.median(call.seconds for call in self.steady)

    @property
    def seconds_p99(self) -> float:
        """The 99th percentile."""
        return float(np.quantile([call.seconds for call in self.steady], 0.99))

    @property
    def ratio(self) -> float:
        """The median of their times over their limits."""
        return statistics.median(call.ratio for call in self.steady)

    @property
    def missing(self) -> float:
        """The median of the shares that were missing."""
        return statistics.median(call.missing for call in self.steady)

    @property
    def failed(self) -> int:
        """The code of the first call that failed, or didn't end; 0: none."""
        return next((call.code for call in self.calls if call.code), 0)


def simulate_collective(
    network: Network,
    nbytes: int,
    *,
    collective: str = "all_reduce",
    hosts: int | None = None,
    ranks_per_host: int = 1,
    options: Options | None = None,
    calls: int = 5,
    settle: int = SETTLE,
    gap: float = 0.0,
    changes: Sequence[Change] = (),
    capacity: int = CAPACITY,
    grain: float | None = None,
) -> Simulated:
    """Runs a collective some times in a row, by whole engines in virtual time.

    The network has no gateways; hosts that it doesn't have are like its first ones, and its seed is
    that of all chance. ``nbytes``, of float32, is the largest buffer of any rank. The first
    ``settle`` calls don't count, since the group gets to know its network. Ranks compute for
    ``gap`` seconds between calls. ``capacity`` is the packets that a receive buffer holds,
    ``grain`` the seconds that a rank rests between two turns at least; None: by the round trip.
    """
    if collective not in COLLECTIVES:
        raise OptionError(f"no collective {collective!r}; there are {', '.join(COLLECTIVES)}")
    if not 0 <= settle < calls:
        raise OptionError(f"{settle} of {calls} calls are left out; wanted less than all")
    options = options or Options()
    topology = _topology(network, hosts, ranks_per_host)
    grain = _grain(network) if grain is None else grain
    changes = sorted(changes, key=lambda change: (change.call, change.after))
    room = np.zeros((2, max(nbytes // 4, topology.world)), np.float32)
    buffers = room[0].ctypes.data, room[1].ctypes.data
    submit = _submits(collective, nbytes, buffers, options)
    peers = _peers(network, topology, options, submit)
    done, bound = [], ""
    with Hosts(network, topology, options, capacity=capacity, grain=grain, peers=peers) as world:
        for number in range(calls):
            mine = [change for change in changes if change.call == number]
            call, bound = _run(world, network, collective, options, submit, mine)
            network = mine[-1].network if mine else network
            done.append(call)
            if call.code:
                break
            world.run(world.now + gap)
    return Simulated(tuple(done), min(settle, len(done) - 1), bound)


def _grain(network: Network) -> float:
    return min(max(network.link.delay_ms * 2e-3 / 200, GRAIN[0]), GRAIN[1])


def _topology(network: Network, hosts: int | None, ranks_per_host: int) -> Topology:
    known = network.total_hosts
    count = known if hosts is None else hosts
    if count < 1 or ranks_per_host < 1 or count * ranks_per_host < 2:
        raise OptionError(
            f"{count} hosts of {ranks_per_host} ranks; wanted 2 ranks at least in all"
        )
    if count * ranks_per_host > MOST_RANKS:
        raise OptionError(
            f"{count} hosts of {ranks_per_host} ranks are {count * ranks_per_host} ranks; wanted "
            f"{MOST_RANKS} at most"
        )
    of_ranks = [host for host in range(count) for _ in range(ranks_per_host)]
    sites = [network.shape.site_of(host) if host < known else 0 for host in of_ranks]
    return Topology.of_labels(of_ranks, sites)


def _submits(
    collective: str, nbytes: int, buffers: tuple[int, int], options: Options
) -> Callable[[Endpoint], None]:
    terms = Terms(options, future=True, encoding=options.encoding)
    return lambda endpoint: COLLECTIVES[collective](endpoint, nbytes, buffers, terms)


def _peers(
    network: Network, topology: Topology, options: Options, submit: Callable[[Endpoint], None]
) -> list[frozenset[int]] | None:
    """Whom each rank has to know, where they are too many to know all."""
    if topology.world <= MOST_KNOWN:
        return None
    peers = planned_peers(network, topology, options, submit)
    pairs = sum(map(len, peers))
    if pairs > MOST_KNOWN**2:
        raise OptionError(
            f"{topology.n_hosts} hosts with {topology.world} ranks send each other packets in "
            f"{pairs} ways; wanted {MOST_KNOWN**2} at most, for memory's sake: simulate fewer "
            f"hosts, or an algorithm whose ranks have fewer partners, as --option algorithm=ring"
        )
    return peers


def _run(
    world: Hosts,
    network: Network,
    collective: str,
    options: Options,
    submit: Callable[[Endpoint], None],
    changes: Sequence[Change],
) -> tuple[Call, str]:
    before, begin = world.counts(), world.now
    for number, rank in enumerate(world.ranks):
        submit(rank.endpoint)
        world.submitted(number)
    limit, bound = _limit(world, network, collective, options)
    for change in changes:
        world.run(begin + change.after)
        world.change(change.network)
    waiting = world.run(begin + LONGEST_SECONDS) if world.run(None) else 0
    ends = [world.ended(number) for number in range(len(world.ranks))]
    reports = [world.report(number) for number in range(len(world.ranks))]
    for rank in world.ranks:
        rank.finish()
    missing = sum(report.packets_missing for report in reports)
    expected = missing + sum(report.packets_received for report in reports)
    code = min(code for _, code in ends) if not waiting else Code.PENDING
    call = Call(
        seconds=max(at for at, _ in ends) - begin,
        limit=limit,
        missing=missing / expected if expected else 0.0,
        resent=sum(report.packets_resent for report in reports),
        counts=world.counts().since(before),
        code=int(code),
    )
    return call, bound


def _limit(world: Hosts, network: Network, collective: str, options: Options) -> tuple[float, str]:
    """In seconds, and what it is of."""
    topology = world.topology
    plans = [rank.group.plan for rank in world.ranks]
    traffic = crossing([plan for plan in plans if plan is not None], topology)
    # What travels, not what headers and parity add.
    first = phases(options.encoding)[0]
    dtype = "f32" if collective in REDUCTIONS or first != "same" else "bytes"
    element = world.payload / elements_of(first, dtype, world.payload)
    busiest, bound = 0.0, "no port has a rate"
    for up, elements in zip((True, False), traffic, strict=True):
        for host, count in enumerate(elements):
            port = network.port_of(host) if host < network.total_hosts else network.port
            rate = port.up_mbit if up else port.down_mbit
            seconds = count * element * 8e-6 / rate if rate else 0.0
            if seconds > busiest:
                busiest = seconds
                bound = f"{rate:g} Mbit/s {'up' if up else 'down'} of host {host}"
    ways = default_algorithm(collective).steps(topology.n_hosts) if topology.n_hosts > 1 else 0
    delay = ways * network.link.delay_ms * 1e-3
    if delay > busiest:
        bound = f"{ways} ways of {network.link.delay_ms:g} ms"
    return busiest + delay, bound


def _call(endpoint: Endpoint, name: str, nbytes: int) -> Collective:
    call = Collective(name, "float32", nbytes // 4)
    endpoint.health.issue(call)
    return call


Buffers = tuple[int, int]
Submit = Callable[[Endpoint, int, Buffers, Terms], None]


def _all_reduce(endpoint: Endpoint, nbytes: int, buffers: Buffers, terms: Terms) -> None:
    call = _call(endpoint, "all_reduce", nbytes)
    endpoint.all_reduce(call, buffers[0], max(1, nbytes // 4), DType.F32, terms)


def _reduce_scatter(endpoint: Endpoint, nbytes: int, buffers: Buffers, terms: Terms) -> None:
    chunk = max(1, nbytes // 4 // endpoint.world)
    call = _call(endpoint, "reduce_scatter", nbytes)
    endpoint.reduce_scatter(call, buffers, chunk, DType.F32, terms)


def _all_gather(endpoint: Endpoint, nbytes: int, buffers: Buffers, terms: Terms) -> None:
    chunk = max(1, nbytes // 4 // endpoint.world) * 4
    endpoint.all_gather(_call(endpoint, "all_gather", nbytes), buffers, chunk, terms)


def _all_to_all(endpoint: Endpoint, nbytes: int, buffers: Buffers, terms: Terms) -> None:
    chunk = max(1, nbytes // 4 // endpoint.world) * 4
    endpoint.all_to_all(_call(endpoint, "all_to_all", nbytes), buffers, chunk, terms)


def _broadcast(endpoint: Endpoint, nbytes: int, buffers: Buffers, terms: Terms) -> None:
    call = _call(endpoint, "broadcast", nbytes)
    endpoint.broadcast(call, buffers[0], max(4, nbytes), 0, terms)


def _gather(endpoint: Endpoint, nbytes: int, buffers: Buffers, terms: Terms) -> None:
    chunk = max(1, nbytes // 4 // endpoint.world) * 4
    endpoint.gather(_call(endpoint, "gather", nbytes), buffers, chunk, 0, terms)


def _scatter(endpoint: Endpoint, nbytes: int, buffers: Buffers, terms: Terms) -> None:
    chunk = max(1, nbytes // 4 // endpoint.world) * 4
    endpoint.scatter(_call(endpoint, "scatter", nbytes), buffers, chunk, 0, terms)


def _barrier(endpoint: Endpoint, nbytes: int, buffers: Buffers, terms: Terms) -> None:
    endpoint.barrier(_call(endpoint, "barrier", 0), terms)


COLLECTIVES: Final[dict[str, Submit]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}
"""By name: submits one at a rank."""
REDUCTIONS: Final = ("all_reduce", "reduce_scatter", "barrier")
