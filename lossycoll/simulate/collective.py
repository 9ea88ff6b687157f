"""Time of a collective on a network, by the engine itself in virtual time (docs/simulate.md)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..lab.network import Network
from ..lab.tcp import Flows, FlowTook
from ..options.fields import Options
from ..plan import Plan, Topology, default_algorithm
from ..plan.codec import elements_of, phases
from ..plan.validation import MAX_WORLD
from ..runtime.collectives.endpoint import Endpoint
from ..runtime.core.call import CallOptions, Collective
from ..runtime.engine.binding import DType
from ..runtime.engine.payload import payload_bytes
from ..runtime.keys.secret import Secret
from .fold import NotAlikeError, fold_of
from .hosts import (
    MOST_KNOWN,
    Counts,
    Hosts,
    missing_of,
    planned,
    planned_elements,
    planned_peers,
    traffic_of,
)

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
    bound: str  # what the limit is of, in words
    missing: float  # the share of packets that was given up, over all ranks
    resent: int  # packets that were sent again
    # at half of the limit: how far a host's furthest path was with what it carries, over its least
    # far one, at the host where that is most; 0: unknown, as the network changed
    spread: float
    counts: Counts  # what the network did
    code: int  # the engine's, of the rank that failed first; 0: none did
    tcp: tuple[FlowTook, ...] = ()  # what each flow of TCP took meanwhile

    @property
    def ratio(self) -> float:
        return self.seconds / self.limit if self.limit else float("inf")


@dataclass(frozen=True)
class Simulated:
    """Outcome of some calls in a row."""

    calls: tuple[Call, ...]  # all of them
    settled: int  # how many of the first don't count for the figures below
    hosts: int  # that there are
    whole: int  # hosts of these that were simulated, and stand for all
    nbytes: int  # the largest buffer: where hosts stand for others, a whole number of packets each

    @property
    def steady(self) -> tuple[Call, ...]:
        return self.calls[self.settled :]

    @property
    def bound(self) -> str:
        return self.calls[-1].bound

    @property
    def seconds(self) -> float:
        return statistics.median(call.seconds for call in self.steady)

    @property
    def seconds_p99(self) -> float:
        return float(np.quantile([call.seconds for call in self.steady], 0.99))

    @property
    def ratio(self) -> float:
        return statistics.median(call.ratio for call in self.steady)

    @property
    def missing(self) -> float:
        return statistics.median(call.missing for call in self.steady)

    @property
    def tcp(self) -> tuple[FlowTook, ...]:
        """What each flow of TCP took during the calls that count."""
        return tuple(
            replace(
                flow[0],
                seconds=sum(one.seconds for one in flow),
                bytes=sum(one.bytes for one in flow),
                resent=sum(one.resent for one in flow),
            )
            for flow in zip(*(call.tcp for call in self.steady), strict=True)
        )

    @property
    def spread(self) -> float:
        return statistics.median(call.spread for call in self.steady)

    @property
    def interval(self) -> tuple[float, float]:
        """Within which the median would be with all hosts simulated, in seconds."""
        if self.whole == self.hosts:
            return self.seconds, self.seconds
        longest = max(call.seconds for call in self.steady)
        return FOLD_ERROR[0] * self.seconds, FOLD_ERROR[1] * longest

    @property
    def failed(self) -> int:
        """The code of the first call that failed, or didn't end; 0: none."""
        return next((call.code for call in self.calls if call.code), 0)


COLLECTIVES: Final = (
    *("all_reduce", "reduce_scatter", "all_gather", "all_to_all"),
    *("broadcast", "gather", "scatter", "barrier"),
)
REDUCTIONS: Final = ("all_reduce", "reduce_scatter", "barrier")
USUALLY_SIMULATED: Final = 32
"""Ranks up to which no host stands for others, where nobody says how many shall."""
FOLDED_HOSTS: Final = 8
"""Hosts that stand for more than that, at most; docs/simulate-accuracy.md has what it costs in
truth."""
FOLDED_PAIRS: Final = 1024
"""Simulated hosts times all ranks, at most, down to the fewest hosts that can stand for all: each
turn of a rank looks at all its peers, which is most of the work."""
FOLD_ERROR: Final = (0.95, 1.1)
"""Times of all hosts were above this share of the median where some stand for all, and below that
of the longest call: the last of many hosts ends later than the last of a few, as in another call
of these."""


def usual_whole(hosts: int, ranks_per_host: int) -> int | None:
    """Number of hosts to simulate; None: all of them."""
    if hosts * ranks_per_host <= USUALLY_SIMULATED or hosts <= FOLDED_HOSTS:
        return None
    dividing = [n for n in range(2, FOLDED_HOSTS + 1) if hosts % n == 0]
    quick = [n for n in dividing if n * hosts * ranks_per_host <= FOLDED_PAIRS]
    return max(quick or dividing[:1], default=None)


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
    tcp: Sequence[Flows] = (),
    grain: float | None = None,
    whole: int | None = None,
    secret: Secret | None = None,
) -> Simulated:
    """Runs a collective some times in a row, by whole engines in virtual time.

    Hosts that the network doesn't have are like its first ones, and at the first site. Its seed is
    that of all chance. ``nbytes``, of float32, is the largest buffer of any rank. The first
    ``settle`` calls don't count, since the group gets to know its network. Ranks compute for
    ``gap`` seconds between calls, beside flows of ``tcp``, and rest for ``grain`` seconds between
    two turns at least; None: by the round trip. ``whole`` hosts are simulated, which stand for the
    others, too (:mod:`.fold`): they divide the hosts, the network is the same everywhere, and of an
    all-reduce each host owns whole packets, for which ``nbytes`` is rounded. None: all hosts. With
    a ``secret`` packets are sealed. TCP and seals exclude hosts that stand for others.

    Long because everything that a caller may choose is an argument.
    """
    if collective not in COLLECTIVES:
        raise OptionError(f"no collective {collective!r}; there are {', '.join(COLLECTIVES)}")
    if not 0 <= settle < calls:
        raise OptionError(f"{settle} of {calls} calls are left out; wanted less than all")
    options = options or Options()
    topology = topology_of(network, hosts, ranks_per_host, whole)
    whole = topology.n_hosts if whole is None else min(whole, topology.n_hosts)
    folds = whole < topology.n_hosts
    if folds and secret is not None:
        raise NotAlikeError("sealed packets can't be renamed: simulate all hosts, or no secret")
    if folds:
        if tcp:
            raise NotAlikeError("no host stands for others beside TCP; simulate all hosts")
        _check_alike(network, topology, whole, changes)
        nbytes = _rounded(network, topology, options, collective, nbytes)
    changes = sorted(changes, key=lambda change: (change.call, change.after))
    load = Load(options, nbytes, topology.world)
    ask = partial(load.submit, name=collective, nbytes=nbytes)
    plan_of = partial(planned, network, topology, options, ask, folds=folds)
    fold = fold_of(plan_of, topology, whole) if folds else None
    ranks = topology.world if fold is None else fold.real
    how: dict[str, Any] = {
        "grain": grain_of(network) if grain is None else grain,
        "peers": _peers(topology, ranks, plan_of),
        "fold": fold,
        "secret": secret,
    }
    done: list[Call] = []
    with Hosts(network, topology, options, **how) as world:
        if tcp:
            world.add_tcp(tcp)
        for number in range(calls):
            mine = [change for change in changes if change.call == number]
            done.append(_run(world, network, collective, options, ask, mine))
            network = mine[-1].network if mine else network
            if done[-1].code:
                break
            world.run(world.now + gap)
    return Simulated(tuple(done), min(settle, len(done) - 1), topology.n_hosts, whole, nbytes)


def _check_alike(
    network: Network, topology: Topology, whole: int, changes: Sequence[Change]
) -> None:
    if whole < 2 or topology.n_hosts % whole:
        raise NotAlikeError(
            f"{whole} hosts can't stand for {topology.n_hosts}: wanted a divisor above 1"
        )
    for one in (network, *[change.network for change in changes]):
        if one.ports or one.links or one.sites > 1:
            raise NotAlikeError(
                "hosts stand for others on a network that is the same everywhere: this one has "
                "ports or links of their own, or sites; simulate all hosts"
            )


def _rounded(
    network: Network, topology: Topology, options: Options, collective: str, nbytes: int
) -> int:
    """The bytes of which each rank owns equally many packets; at most an eighth is changed."""
    if collective != "all_reduce":
        return nbytes
    first = phases(options.encoding)[0]
    each = 4 * topology.world * elements_of(first, "f32", payload_bytes(network.mtu, 4))
    found = each * max(1, round(nbytes / each))
    if abs(found - nbytes) > nbytes / 8:
        raise NotAlikeError(
            f"{nbytes} bytes can't be cut into whole packets for each of {topology.world} ranks; "
            f"wanted {4 * each} bytes or more, or all hosts simulated"
        )
    return found


def grain_of(network: Network) -> float:
    """How long a rank rests between two turns: a 200th of the round trip, within what busy and idle
    kernels take."""
    return min(max(network.link.delay_ms * 2e-3 / 200, 10e-6), 100e-6)


def topology_of(
    network: Network, hosts: int | None, ranks_per_host: int, whole: int | None
) -> Topology:
    known = network.total_hosts
    count = known if hosts is None else hosts
    if count < 1 or ranks_per_host < 1 or count * ranks_per_host < 2:
        raise NotAlikeError(
            f"{count} hosts of {ranks_per_host} ranks; wanted 2 ranks at least in all"
        )
    simulated = (count if whole is None else min(whole, count)) * ranks_per_host
    if simulated > MOST_RANKS or count * ranks_per_host > MAX_WORLD:
        raise NotAlikeError(
            f"{count} hosts of {ranks_per_host} ranks are {count * ranks_per_host} ranks, of which "
            f"{simulated} are simulated; wanted {MAX_WORLD} and {MOST_RANKS} at most"
        )
    of_ranks = [host for host in range(count) for _ in range(ranks_per_host)]
    sites = [network.site_of(host) if host < known else 0 for host in of_ranks]
    return Topology.of_labels(of_ranks, sites)


def _peers(
    topology: Topology, ranks: int, plan_of: Callable[[int], tuple[Plan, int]]
) -> list[frozenset[int]] | None:
    """Whom each of the first ranks has to know, where they are too many to know all."""
    if topology.world <= MOST_KNOWN:
        return None
    peers = planned_peers([plan_of(rank)[0] for rank in range(ranks)])
    pairs = sum(map(len, peers))
    if pairs > MOST_KNOWN**2:
        raise OptionError(
            f"{topology.n_hosts} hosts with {topology.world} ranks send each other packets in "
            f"{pairs} ways; wanted {MOST_KNOWN**2} at most, for memory's sake: simulate fewer "
            f"hosts, fewer of them whole, or an algorithm whose ranks have fewer partners, as "
            f"--option algorithm=ring"
        )
    return peers


def _run(
    world: Hosts,
    network: Network,
    collective: str,
    options: Options,
    ask: Callable[[Endpoint], None],
    changes: Sequence[Change],
) -> Call:
    before, begin, tcp = world.counts(), world.now, world.tcp()
    for number in range(len(world.ranks)):
        world.submit(number, ask)
    plans = [rank.group.plan for rank in world.ranks]
    elements = planned_elements([plan for plan in plans if plan is not None], world.topology)
    limit, bound = _limit(world, network, collective, options, elements)
    sent = world.sent()
    world.count_until(begin + limit / 2)
    for change in changes:
        world.run(begin + change.after)
        world.change(change.network)
    ends, code, reports = world.finish(len(world.ranks))
    images = world.topology.world // len(world.ranks)
    return Call(
        seconds=max(ends) - begin,
        limit=limit,
        bound=bound,
        missing=missing_of(reports),
        resent=images * sum(report.packets_resent for report in reports),
        spread=0.0 if changes else _spread(world.sent() - sent, elements),
        counts=world.counts().since(before, images),
        code=int(code),
        tcp=tuple(now.since(then) for now, then in zip(world.tcp(), tcp, strict=True)),
    )


def _spread(sent: NDArray[np.uint64], elements: NDArray[np.float64]) -> float:
    """:attr:`Call.spread`, by what was sent from host to host, and what a call sends in all."""
    worst = 1.0
    for mine, of in zip(sent, elements, strict=True):
        done = mine[of > 0] / of[of > 0]
        if done.size:
            worst = max(worst, float(done.max() / done.min()) if done.min() else float("inf"))
    return worst


def _limit(
    world: Hosts,
    network: Network,
    collective: str,
    options: Options,
    elements: NDArray[np.float64],
) -> tuple[float, str]:
    """In seconds, and what it is of. ``elements``: those from each host to each other."""
    topology = world.topology
    traffic = traffic_of(elements, topology)
    # What travels, not what headers and parity add.
    first = phases(options.encoding)[0]
    dtype = "f32" if collective in REDUCTIONS or first != "same" else "bytes"
    element = world.payload / elements_of(first, dtype, world.payload)
    busiest, bound = 0.0, "no port has a rate"
    for what, both in traffic.items():
        for up, counts in zip((True, False), both, strict=True):
            for number, count in enumerate(counts):
                port = network.gateway if what == "site" else network.port_of(number)
                rate = port.up_mbit if up else port.down_mbit
                seconds = count * element * 8e-6 / rate if rate else 0.0
                if seconds > busiest:
                    busiest = seconds
                    bound = f"{rate:g} Mbit/s {'up' if up else 'down'} of {what} {number}"
    ways = default_algorithm(collective).steps(topology.n_hosts) if topology.n_hosts > 1 else 0
    link = network.link if topology.n_sites == 1 else network.wan
    delay = ways * link.delay_ms * 1e-3
    if delay > busiest:
        bound = f"{ways} ways of {link.delay_ms:g} ms"
    return busiest + delay, bound


class Load:
    """Submits collectives of float32, with buffers that all ranks share."""

    def __init__(self, options: Options, nbytes: int, world: int) -> None:
        self._room = np.zeros((2, max(nbytes // 4, world)), np.float32)
        self.options = options
        self._call_options = CallOptions(options, future=True, encoding=options.encoding)

    def submit(self, endpoint: Endpoint, name: str, nbytes: int) -> None:
        """``nbytes``: of the largest buffer of any rank."""
        call = Collective(name, "float32", 0 if name == "barrier" else nbytes // 4)
        endpoint.health.issue(call)
        buffers = self._room[0].ctypes.data, self._room[1].ctypes.data
        options = self._call_options
        elements, chunk = max(1, nbytes // 4), max(1, nbytes // 4 // endpoint.world)
        if name == "all_reduce":
            endpoint.all_reduce(call, buffers[0], elements, DType.F32, options)
        elif name == "reduce_scatter":
            endpoint.reduce_scatter(call, buffers, chunk, DType.F32, options)
        elif name == "barrier":
            endpoint.barrier(call, options)
        elif name == "broadcast":
            start = buffers[0], buffers[0]
            endpoint.copy(name, call, start, options, max(4, nbytes), root=0)
        else:
            root = {"root": 0} if name in ("gather", "scatter") else {}
            endpoint.copy(name, call, buffers, options, 4 * chunk, **root)
