"""Hosts of the engine in virtual time: everything is the product's own, but for links and clock.

Only this file knows ``lossycoll._sim`` (native/sim/sim.h): a network in memory, which loses, delays
and drops as a :class:`lossycoll.lab.Network` says, and whose turn it is. Endpoints, plans, groups,
control law and timers are those of a job; what they add up is not looked at, so all ranks share
their buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lossycoll._sim import ffi, lib

from ..errors import EngineError, OptionError
from ..lab.network import ETHERNET_BYTES, Network, Port, link_fields, port_fields
from ..lab.tcp import Flows, FlowTook, placed
from ..options.fields import Options
from ..plan import Plan, Topology
from ..runtime.collectives.endpoint import Endpoint
from ..runtime.collectives.group_context import GroupContext, Members
from ..runtime.collectives.plan_cache import Choice
from ..runtime.engine.binding import EngineGroup
from ..runtime.engine.failures import Code
from ..runtime.engine.host import Host, step_functions
from ..runtime.engine.payload import IP_UDP_BYTES, SHARED_PAYLOAD, payload_bytes
from ..runtime.engine.reports import LinkInfo, Report
from ..runtime.keys.secret import Secret
from ..runtime.world.group_state import Health
from ..runtime.world.messages import View
from .fold import Fold, alike, stride_of

CONGESTION: Final = {"reno": 1, "cubic": 2}
"""Congestion controls of TCP that a simulation has, by the numbers of sim.h."""
GROUP: Final = 1
SESSION: Final = 9
MOST_KNOWN: Final = 256
"""Ranks that can all know one another: each takes 85 KB for each that it knows."""


@dataclass(frozen=True)
class Counts:
    """Counters of the network since it began."""

    packets: int  # that were sent between hosts
    bytes: int  # of those, everything below the engine included
    dropped_up: int  # packets that found the queue before their sender's port full
    dropped_down: int  # the same before their receiver's
    dropped_gateway: int  # the same before a site's gateway
    dropped_link: int  # the same before a link's own rate
    policed: int  # packets that were above a policer's rate
    lost: int  # by the links' own loss
    overflow: int  # packets that found a receive buffer full
    site_packets: int  # that came to their sites' gateways
    site_bytes: int  # of those
    local_packets: int  # that were sent within hosts
    local_bytes: int  # of those
    turns: int  # that the engine took

    def since(self, before: Counts, times: int = 1) -> Counts:
        mine, others = vars(self), vars(before)
        return Counts(**{name: times * (value - others[name]) for name, value in mine.items()})


class _Group(EngineGroup):
    """One that remembers what was submitted last, and refuses plans with strangers."""

    plan: Plan | None = None
    ticket = 0
    known: frozenset[int] = frozenset()

    def submit(self, call: Any, *rest: Any, **named: Any) -> int:
        strangers = peers_of(call.plan) - self.known
        if strangers:
            raise EngineError(
                f"rank {call.plan.rank} of a simulation needs rank {min(strangers)}, which the "
                f"first plan of {call.plan.collective} did not; simulate {MOST_KNOWN} ranks or "
                f"fewer"
            )
        self.plan = call.plan
        self.ticket = super().submit(call, *rest, **named)
        return self.ticket


class Rank(NamedTuple):
    """One rank: its host, its group, and the endpoint that makes collectives of them."""

    host: Host
    group: _Group
    endpoint: Endpoint


class _Alike(Endpoint):
    """One whose drawn orders are alike for all hosts, for a fold."""

    stride = 1

    def _order(
        self, choice: Choice, members: Members, options: Options, number: int, packets: int
    ) -> tuple[int, ...] | None:
        drawn = super()._order(choice, members, options, number, packets)
        if drawn is None or len(drawn) < self.world:
            return drawn
        self.stride = stride_of(options.seed, GROUP, number, self.topology.n_hosts)
        return alike(self.topology, self.stride)


def _endpoint(rank: int, topology: Topology, options: Options, group: Any, folds: bool) -> Endpoint:
    health = Health(
        rank,
        topology.world,
        addresses=["memory"] * topology.world,
        liveness=options.liveness,
        control=None,
        on_failure=lambda error: None,
    )
    context = GroupContext(health, options, GROUP, group, None, topology)
    # A call hangs that takes an hour of virtual time.
    return (_Alike if folds else Endpoint)(context, timeout=3600.0)


def peers_of(plan: Plan) -> frozenset[int]:
    to = {edge.peer for slot in plan.slots for edge in slot.dests}
    return frozenset(to | {peer for slot in plan.slots for peer in slot.sources})


def planned(
    network: Network,
    topology: Topology,
    options: Options,
    call: Callable[[Endpoint], object],
    rank: int,
    *,
    folds: bool = False,
) -> tuple[Plan, int]:
    """A rank's plan of what ``call`` submits first, and with a fold the stride of its order."""
    payload, topology = _packets(network, topology)
    plans: list[Plan] = []

    def submit(call: Any, *_: object) -> int:
        plans.append(call.plan)
        return 0  # no ticket: nothing is done

    link = LinkInfo(0, 0, (), 0, payload)
    group = SimpleNamespace(link=lambda: link, submit=submit, wait=None)
    endpoint = _endpoint(rank, topology, options, group, folds)
    call(endpoint)
    return plans[0], getattr(endpoint, "stride", 1)


def planned_peers(plans: Sequence[Plan]) -> list[frozenset[int]]:
    """Whom each rank sends to or hears of: the first ones, whose plans these are."""
    found: list[set[int]] = [set() for _ in plans]
    for plan in plans:
        for peer in peers_of(plan):
            found[plan.rank].add(peer)
            if peer < len(plans):
                found[peer].add(plan.rank)
    return [frozenset(one) for one in found]


def _packets(network: Network, topology: Topology) -> tuple[int, Topology]:
    """Bytes that a packet carries, and the topology that says how many make one within a host."""
    payload = payload_bytes(network.mtu, 4)
    if not topology.shares_hosts:
        return payload, topology
    packets = max(1, SHARED_PAYLOAD // payload)  # as backend/sharing.py
    return payload, Topology(topology.hosts, topology.sites, packets)


class Hosts:
    """Hosts on a network, each with some ranks, which form one group.

    Hosts that the network doesn't have are like its first ones, and at the first site.
    ``grain`` is the seconds that a rank rests between two turns at least, as an operating system's
    wake-ups have it: what comes meanwhile is taken at once. ``peers`` are whom each rank will send
    to or hear of; the others are unknown to it, which takes less memory. None: all know all. With
    ``fold``, its ranks alone are simulated, and the network is that of the first host everywhere.
    With a ``secret`` all packets between hosts are sealed, which excludes a fold.
    """

    def __init__(
        self,
        network: Network,
        topology: Topology,
        options: Options,
        *,
        grain: float,
        peers: Sequence[frozenset[int]] | None = None,
        fold: Fold | None = None,
        secret: Secret | None = None,
    ) -> None:
        payload, topology = _packets(network, topology)
        self.topology: Final = topology
        world = topology.world if fold is None else fold.real
        self._fold: Final = fold
        self._secret: Final = secret
        self._hosts: Final = topology.hosts[world - 1] + 1
        self.payload: Final = payload
        places = ffi.new("uint16_t[]", list(topology.hosts))
        config = ffi.new("lc_sim_config *")
        config.ranks = topology.world
        config.places = places
        config.payload_bytes = payload
        config.wire_bytes = IP_UDP_BYTES[4] + ETHERNET_BYTES
        config.capacity = 16_384  # what the kernel gives who may ask for 32 MiB
        config.local_payload = SHARED_PAYLOAD if topology.shares_hosts else 0
        config.sealed = secret is not None
        config.grain_ns = round(grain * 1e9)
        config.seed = network.seed
        self._sim = lib.lc_sim_open(config, _engine())
        if self._sim == ffi.NULL:
            raise MemoryError("no memory for a simulation")
        if fold is not None:
            lib.lc_sim_fold(self._sim, world, SESSION, fold.fixed, fold.block)
        site_of = dict(zip(topology.hosts, topology.sites, strict=True))
        self._sites: Final = topology.n_sites if topology.n_sites > 1 else 0
        if self._sites:
            lib.lc_sim_set_sites(self._sim, ffi.new("uint16_t[]", list(site_of.values())))
        self.ranks: Final[list[Rank]] = []
        self._tickets: list[tuple[int, int]] = []
        self._flows: list[tuple[Flows, tuple[int, int]]] = []
        for host in range(self._hosts):
            # 1 us and 10 GB/s between ranks of a host, as docs/shared-memory.md has them.
            lib.lc_sim_set_memory(self._sim, host, 1000, 10e9)
        self.change(network)
        everyone = frozenset(range(topology.world))
        for rank in range(world):
            self.ranks.append(self._rank(rank, options, everyone if peers is None else peers[rank]))

    def _rank(self, rank: int, options: Options, peers: frozenset[int]) -> Rank:
        topology, world = self.topology, self.topology.world
        setting = int(ffi.cast("uintptr_t", lib.lc_sim_setting(self._sim, rank)))
        host = Host(
            rank, world, "memory", payload_bytes=self.payload, options=options, setting=setting
        )
        mine = topology.members_of_hosts[topology.hosts[rank]]
        shared = dict.fromkeys(mine, (0, 0)) if len(mine) > 1 else None
        known = [("memory", 0) if i in peers or i == rank else None for i in range(world)]
        if self._secret is not None:
            host.seal(self._secret.path_secrets("", rank, world), self._secret.filter(""))
        host.start(SESSION, known, topology, shared)
        group = _Group(
            host, rank, world, number=GROUP, fault_group=GROUP, options=options, met=True
        )
        group.known = peers | {rank}
        endpoint = _endpoint(rank, topology, options, group, self._fold is not None)
        lib.lc_sim_take(self._sim, rank, ffi.cast("void *", host.address))
        return Rank(host, group, endpoint)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.group.close()
            rank.host.close()
        lib.lc_sim_close(self._sim)

    def add_tcp(self, wanted: Sequence[Flows]) -> None:
        """Has flows of TCP send from now on; not with a fold."""
        if self._secret is not None:  # such a net has no zeros in place of payloads
            raise OptionError("no TCP is simulated beside sealed packets: leave the secret out")
        for kind, pair in placed(wanted, Network(hosts=self.topology.n_hosts)):
            if kind.congestion not in CONGESTION:
                raise OptionError(
                    f"a simulation has no TCP {kind.congestion!r}; wanted {' or '.join(CONGESTION)}"
                )
            number = CONGESTION[kind.congestion]
            if lib.lc_sim_add_tcp(self._sim, *pair, number, kind.share) < 0:
                raise MemoryError("no memory for flows of TCP")
            self._flows.append((kind, pair))

    def tcp(self) -> tuple[FlowTook, ...]:
        """What each flow of TCP has taken since the beginning of time."""
        out, found = [], ffi.new("uint64_t[2]")
        for flow, (kind, pair) in enumerate(self._flows):
            lib.lc_sim_tcp_took(self._sim, flow, found, found + 1)
            out.append(FlowTook(kind.congestion, pair, self.now, *found))
        return tuple(out)

    def change(self, network: Network) -> None:
        """Changes the network from now on; it has as many hosts as before, and no policers of
        links."""
        if any(link.policer_ms is not None for link in network.all_links):
            raise OptionError("a simulation has policers at ports alone: give policer_ms to a port")
        known, mtu = network.total_hosts, network.mtu
        usual = ffi.new("lab_link *", link_fields(network.link, mtu))
        for site in range(self._sites):
            self._set_port(lib.lc_sim_set_gateway, site, network.gateway, mtu)
        for host in range(self._hosts):
            self._set_port(lib.lc_sim_set_port, host, network.port_of(host), mtu)
            for other in range(self.topology.n_hosts):
                differs = max(host, other) < known and host != other
                link = [link_fields(network.link_of(host, other), mtu)] if differs else usual
                lib.lc_sim_set_path(self._sim, host, other, link)

    def _set_port(self, by: Any, number: int, port: Port, mtu: int) -> None:
        for up, rate in zip((1, 0), port_fields(port, mtu), strict=True):
            by(self._sim, number, up, [rate])

    @property
    def now(self) -> float:
        return float(lib.lc_sim_now(self._sim)) * 1e-9

    def submit(self, rank: int, ask: Callable[[Endpoint], object]) -> None:
        """Has a rank submit an operation by its endpoint: :meth:`finish` waits for it."""
        group, endpoint = self.ranks[rank].group, self.ranks[rank].endpoint
        ask(endpoint)
        if self._fold is not None and isinstance(endpoint, _Alike):
            number = endpoint.operations.sequencer.next - 1
            lib.lc_sim_fold_step(self._sim, number, self._fold.step_of(endpoint.stride))
        address = ffi.cast("void *", group.address)
        if not lib.lc_sim_await(self._sim, rank, address, group.ticket):
            raise OptionError(
                "more operations at once than a simulation awaits: use larger buckets"
            )
        self._tickets.append((rank, group.ticket))

    def kill(self, rank: int) -> None:
        lib.lc_sim_stop(self._sim, rank)

    def give_up(self, dead: Sequence[int], survivors: Sequence[int]) -> None:
        """The control plane says to all that ranks are lost, and they continue without these."""
        following = max(self.ranks[rank].endpoint.lose(one) for rank in survivors for one in dead)
        everyone = View(0, tuple(range(self.topology.world)))
        for rank in survivors:
            self.ranks[rank].endpoint.go_on((everyone, View(following, tuple(survivors))), True)

    def run(self, until: float | None = None) -> int:
        """Lets time pass until then, or all submitted has ended; returns how many ranks wait."""
        end = (1 << 64) - 1 if until is None else round(until * 1e9)
        return int(lib.lc_sim_run(self._sim, end))

    def finish(self, ranks: int) -> tuple[list[float], Code, list[Report]]:
        """Lets time pass until all submitted has ended. Returns when the last operation of each of
        the first ``ranks`` did, the code of one that failed, and a report for each operation."""
        waiting, code = self.run(), ffi.new("int *")
        ends, codes = [], []
        for rank in range(ranks):
            ends.append(float(lib.lc_sim_ended(self._sim, rank, code)) * 1e-9)
            codes.append(code[0])
        reports = [self.ranks[rank].group.result(ticket)[0] for rank, ticket in self._tickets]
        self._tickets.clear()
        for one in self.ranks[:ranks]:  # which takes the reports
            for operation in list(one.endpoint.operations.unfinished.values()):
                operation.poll()
        return ends, Code.PENDING if waiting else Code(min(codes)), reports

    def count_until(self, when: float) -> None:
        """The last time until which :meth:`sent` counts."""
        lib.lc_sim_count_until(self._sim, int(when * 1e9))

    def sent(self) -> NDArray[np.uint64]:
        """Bytes that each simulated host's port has let through to each host until then."""
        found = np.zeros((self._hosts, self.topology.n_hosts), np.uint64)
        for host, row in enumerate(found):
            lib.lc_sim_sent(self._sim, host, ffi.from_buffer("uint64_t[]", row))
        return found

    def counts(self) -> Counts:
        found = ffi.new("lc_sim_counts *")
        lib.lc_sim_counted(self._sim, found)
        return Counts(*(getattr(found, one.name) for one in fields(Counts)))


def missing_of(reports: Sequence[Report]) -> float:
    """Share of the packets that was given up."""
    missing = sum(report.packets_missing for report in reports)
    return missing / (missing + sum(report.packets_received for report in reports) or 1)


def planned_elements(plans: Sequence[Plan], topology: Topology) -> NDArray[np.float64]:
    """Elements from each host of these plans to each other host."""
    hosts = topology.hosts
    found = np.zeros((hosts[plans[-1].rank] + 1, topology.n_hosts))
    for plan in plans:
        for slot in plan.slots:
            for dest in slot.dests:
                found[hosts[plan.rank], hosts[dest.peer]] += slot.length
    np.fill_diagonal(found, 0)
    return found


def traffic_of(elements: NDArray[np.float64], topology: Topology) -> dict[str, list[list[float]]]:
    """Elements that leave each "host" and each "site" for others, and those that come to it.
    ``elements``: from each host to each other (:func:`planned_elements`), of all, or of those
    simulated."""
    hosts = len(elements)
    down = np.zeros(hosts)
    np.add.at(down, np.arange(topology.n_hosts) % hosts, elements.sum(axis=0))
    site_of = np.array([topology.sites[ranks[0]] for ranks in topology.members_of_hosts])
    out, into = np.zeros((2, topology.n_sites))
    for host, site in enumerate(site_of[:hosts]):
        others = np.where(site_of == site, 0, elements[host])
        out[site] += others.sum()
        np.add.at(into, site_of, others)
    found = {"host": [elements.sum(axis=1), down], "site": [out, into]}
    return {what: [each.tolist() for each in both] for what, both in found.items()}


def _engine() -> Any:
    turn, idle_ns, wait = (ffi.cast("void *", one) for one in step_functions())
    return ffi.new("lc_sim_engine *", {"turn": turn, "idle_ns": idle_ns, "wait": wait})
