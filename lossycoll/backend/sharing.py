"""Ranks that share a host: found out as the ranks meet, so that all of them know it alike.

Ranks whose machines look the same try to hand one another their memory. What became of it goes
round once more, and a host is a set of ranks of which each has every other one's.
docs/rendezvous.md has the steps.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from lossycoll.errors import EngineError, RendezvousError
from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.plan.topology import Sites, find_sites, measured_by
from lossycoll.runtime.core import logfmt
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.engine.host import Host, shared_bytes
from lossycoll.runtime.net.descriptor_exchange import DescriptorExchange
from lossycoll.runtime.net.machine import Machine, core_mask, memory_room, this_machine
from lossycoll.runtime.net.round_trips import round_trips
from lossycoll.runtime.world.rendezvous import Rendezvous

FLAT: Final = "inject is set, so that each rank counts as a host of its own"


@dataclass(frozen=True, slots=True)
class Offer:
    """Description of a rank's host for the other ranks."""

    machine: Machine | None  # Where it is; None: it doesn't know
    # Its options ``host`` and ``site``: ranks that differ in one share nothing
    labels: tuple[str, str]
    socket: str  # Where it takes descriptors; empty: it shares no memory
    why: str = ""  # Why it doesn't
    cores: int = 0  # Those that it may run on, one bit each

    def to_json(self) -> dict[str, Any]:
        machine = self.machine.to_json() if self.machine else None
        return {**asdict(self), "machine": machine, "cores": f"{self.cores:x}"}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Offer:
        host, site = said["labels"]
        machine = Machine.from_json(said["machine"])
        labels = (str(host), str(site))
        cores = int(str(said["cores"]), 16)
        return cls(machine, labels, str(said["socket"]), str(said["why"]), cores)


@dataclass(frozen=True, slots=True)
class Sharing:
    """This rank's end: what it offers, and the socket that it listens at, if it does."""

    offer: Offer
    exchange: DescriptorExchange | None

    def close(self) -> None:
        if self.exchange is not None:
            self.exchange.close()


def open_sharing(options: Options, ranks: int) -> Sharing:
    """Opens what this process offers to others of its machine, before it meets them."""
    machine = exchange = None
    why = FLAT if options.inject else "option link is 'udp'" if options.link == "udp" else ""
    try:
        machine = this_machine()
    except (OSError, ValueError) as error:
        why = f"its machine is unknown: {error}"
    if not why:
        try:
            exchange = DescriptorExchange(ranks)
        except OSError as error:
            why = f"there are no abstract Unix sockets here: {error.strerror}"
    labels, name = (options.host, options.site), exchange.name if exchange else ""
    return Sharing(Offer(machine, labels, name, why, core_mask()), exchange)


def share(
    where: Where,
    rendezvous: Rendezvous,
    host: Host,
    sharing: Sharing,
    offers: Sequence[Offer],
    token: str,
) -> tuple[Topology, Mapping[int, tuple[int, int]]]:
    """Finds out who shares a host: all ranks call it at the same place of their rendezvous.

    There are two more rounds if some ranks look as if they shared a host, and none otherwise.
    Returns the topology, and the descriptors of each other process of this host.
    """
    sites = [offer.labels[1] for offer in offers]
    sets = alike(offers)
    if all(len(ranks) == 1 for ranks in sets):
        _tell_apart(where, offers, (where.rank,), {})
        return Topology.of_labels(range(where.world), sites), {}
    mine = next(ranks for ranks in sets if where.rank in ranks)
    others = [rank for rank in mine if rank != where.rank]
    exchange = sharing.exchange
    failed, payload, why = _send(where, host, exchange, mine, offers, token)

    def take() -> None:
        if exchange is not None:
            exchange.take(token, others)

    whys = rendezvous.exchange("sent", why, take)
    take()
    taken = dict(exchange.taken) if exchange is not None else {}
    answers = rendezvous.exchange("shared", [sorted(taken), payload])
    hosts = hosts_of(sets, [answer[0] for answer in answers])
    payload = min([answer[1] for answer in answers if answer[1]], default=0)
    packets = payload // host.link().payload_bytes if len(set(hosts)) < where.world else 1
    topology = Topology.of_labels(hosts, sites, max(1, packets))
    here = topology.members_of_hosts[topology.hosts[where.rank]]
    refused = exchange.refused if exchange is not None else {}
    reasons = {
        rank: failed.get(rank) or why or whys[rank] or refused.get(rank) or refused.get(-1, "")
        for rank in others
    }
    for rank in others:
        if where.rank not in answers[rank][0]:
            reasons[rank] = reasons[rank] or "it couldn't take this rank's memory, and logs why"
    _tell_apart(where, offers, here, reasons)
    return topology, {rank: taken[rank] for rank in here if rank != where.rank}


def _send(
    where: Where,
    host: Host,
    exchange: DescriptorExchange | None,
    mine: Sequence[int],
    offers: Sequence[Offer],
    token: str,
) -> tuple[dict[int, str], int, str]:
    """Returns why to whom memory couldn't be sent, a packet's bytes there, and why it has none."""
    if exchange is None or len(mine) == 1:
        return {}, 0, ""
    room, wanted = memory_room(), shared_bytes(len(mine)) * len(mine)
    if room < wanted:
        return {}, 0, f"{room:.3g} bytes of memory are free, and sharing may take {wanted:.3g}"
    try:
        descriptors = host.share(mine)
    except EngineError as error:
        return {}, 0, str(error)
    names = {rank: offers[rank].socket for rank in mine if rank != where.rank}
    failed = exchange.send(where.rank, token, names, descriptors)
    return failed, host.link(1).payload_bytes, ""


def alike(offers: Sequence[Offer]) -> list[tuple[int, ...]]:
    """The ranks in sets whose members look as if they shared a host; each is in one."""
    found: dict[object, list[int]] = defaultdict(list)
    for rank, offer in enumerate(offers):
        shares = offer.machine is not None and offer.socket
        found[(offer.machine, offer.labels) if shares else rank].append(rank)
    return [tuple(ranks) for ranks in found.values()]


def is_crowded(rank: int, offers: Sequence[Offer], limit: float) -> bool:
    """True if more ranks run on this one's machine than there are cores for them."""
    mine = offers[rank].machine
    here = [offer for offer in offers if mine is not None and offer.machine == mine]
    cores = 0
    for offer in here:
        cores |= offer.cores
    return len(here) > min(cores.bit_count(), limit)


def hosts_of(sets: Sequence[Sequence[int]], taken: Sequence[Iterable[int]]) -> list[int]:
    """Host number of each rank. All ranks of a host have each other's memory."""
    has = [frozenset(ranks) for ranks in taken]
    hosts: list[list[int]] = []
    for ranks in sets:
        within: list[list[int]] = []
        for rank in ranks:
            for host in within:
                if all(other in has[rank] and rank in has[other] for other in host):
                    host.append(rank)
                    break
            else:
                within.append([rank])
        hosts += within
    numbers = {rank: number for number, host in enumerate(hosts) for rank in host}
    return [numbers[rank] for rank in range(len(numbers))]


def topology_of(where: Where, host: Host, members: Sequence[int], options: Options) -> Topology:
    """Topology of a group of some of a host's processes. ``where``: this rank in the group."""
    found = host.topology.of_members(members)
    if options.inject and found.shares_hosts:
        here = found.members_of_hosts[found.hosts[where.rank]]
        if len(here) > 1:
            apart = ",".join([str(rank) for rank in here if rank != where.rank])
            logfmt.event(logging.INFO, where, "apart", ranks=apart, why=FLAT)
        return Topology.of_labels(range(found.world), found.sites)
    return found


def _tell_apart(
    where: Where, offers: Sequence[Offer], here: Sequence[int], reasons: Mapping[int, str]
) -> None:
    """Logs, in one line, which ranks of this machine packets go to by UDP all the same, and why."""
    mine = offers[where.rank]
    if mine.machine is None:
        if where.world > 1:
            logfmt.event(logging.INFO, where, "apart", ranks="all", why=mine.why)
        return
    apart = [
        rank
        for rank, offer in enumerate(offers)
        if rank not in here
        and offer.machine is not None
        and offer.machine.boot == mine.machine.boot
        and offer.labels == mine.labels
    ]
    if not apart:
        return
    first = offers[apart[0]]
    why = mine.why or first.why or reasons.get(apart[0]) or ""
    if not why and first.machine != mine.machine:
        why = "another user's, or in a container with other namespaces"
    logfmt.event(
        logging.INFO,
        where,
        "apart",
        ranks=",".join(map(str, apart)),
        why=why or "no memory came from there",
    )


LEARNT: Final = "auto"
"""The value of the option ``site`` that has sites learnt."""


def compare_sites(where: Where, sites: Sequence[str]) -> None:
    """Raises RendezvousError, with the same content on every rank, if only some have a site, or
    some name theirs and others have it learnt."""
    by_name = f"to {LEARNT!r} on all ranks, or to the name of its site on each"
    for with_it, it, remedy in (
        ([site != "" for site in sites], "one", "on all ranks, or on none"),
        ([site == LEARNT for site in sites], repr(LEARNT), by_name),
    ):
        if all(with_it) or not any(with_it):
            continue
        one, other = with_it.index(True), with_it.index(False)
        raise RendezvousError(
            f"{where}: option site is {sites[one]!r} on rank {one} and "
            f"{repr(sites[other]) if sites[other] else 'not set'} on rank {other} ({sum(with_it)} "
            f"of {len(sites)} ranks have {it}); set LOSSYCOLL_SITE {remedy}",
            peer=other if other != where.rank else one,
        )


def learn_sites(
    where: Where,
    rendezvous: Rendezvous,
    topology: Topology,
    places: Sequence[tuple[str, int]],
    measure: Callable[[Mapping[int, tuple[str, int]]], Mapping[int, float]] | None = None,
) -> Topology:
    """Finds the sites by round trips: all ranks call it at the same place of their rendezvous.

    The lowest rank of each host measures to those of some others, and one round more tells all
    ranks what all have measured. There is none where there are fewer than three hosts.

    ``places``: address and TCP port at which each rank listens, by rank. ``measure``: how; None: by
    :func:`round_trips`.
    """
    hosts = topology.n_hosts
    first = [ranks[0] for ranks in topology.members_of_hosts]
    known: dict[tuple[int, int], float] = {}
    if hosts > 2:
        mine: list[int] = []
        host = topology.hosts[where.rank]
        if first[host] == where.rank:
            others = measured_by(host, hosts)
            found = (measure or round_trips)({other: places[first[other]] for other in others})
            mine = [round(1e6 * found.get(other, 0)) for other in others]
        said = rendezvous.exchange("round_trips", mine)
        for host, rank in enumerate(first):
            known |= _measured(host, hosts, said[rank])
    sites = find_sites(hosts, known)
    if where.rank == 0:
        _tell(where, topology, sites)
    return topology.with_sites(sites.of_hosts)


def _measured(host: int, hosts: int, said: Any) -> dict[tuple[int, int], float]:
    """Seconds by pair, of what a host's rank says: microseconds, 0 where there was no answer."""
    others = measured_by(host, hosts)
    if not isinstance(said, Sequence) or len(said) != len(others):
        return {}
    return {
        (host, other): value * 1e-6
        for other, value in zip(others, said, strict=True)
        if type(value) is int and value > 0
    }


def _tell(where: Where, topology: Topology, sites: Sites) -> None:
    found = topology.with_sites(sites.of_hosts)
    logfmt.event(
        logging.INFO,
        where,
        "sites",
        sites=found.n_sites,
        ranks=" ".join(",".join(map(str, ranks)) for ranks in found.members_of_sites),
        why=sites.why,
    )
