"""The steps by which a group is made: each returns what it has made, and what it is made of.

A step that needs the other ranks goes through the rendezvous, in the same order on all of them.
What a step has opened is closed by ``Making.undo`` if a later one fails.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from torch._C._distributed_c10d import PrefixStore, Store

from lossycoll.errors import LossyError, OptionError
from lossycoll.options.fields import Options
from lossycoll.plan import Topology, faults
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.collectives.plan_cache import name_of
from lossycoll.runtime.core import logfmt
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.engine.host import Host, host_options, version, wire_version
from lossycoll.runtime.membership.control_plane import ControlPlane
from lossycoll.runtime.membership.definition import (
    Definition,
    compare_options,
    compare_versions,
)
from lossycoll.runtime.membership.error_kinds import kind_of_unmade
from lossycoll.runtime.membership.group_state import Health
from lossycoll.runtime.membership.membership import Membership
from lossycoll.runtime.membership.reachability import common_version, compare_machines
from lossycoll.runtime.net.cores import core_limit
from lossycoll.runtime.net.interfaces import Interface, candidates, choose

from .cohorts import COHORTS, Cohort, with_liveness_of
from .group_listener import GroupListener, MeetingListener
from .making import DataPath, Ends, Joined, Making, Met, Place, PreparedRank
from .meeting import Meeting
from .packet_size import attachment
from .rdma import Reach, agree, open_rdma
from .resource_limits import check_descriptors, refused
from .sealing import fields_of_seal, warn_of_clear
from .sharing import Offer, Sharing, is_crowded, open_sharing, share, topology_of
from .sites import LEARNT, compare_sites, learn_sites
from .status import show, tell

log: Final = logging.getLogger("lossycoll")


def prepare(making: Making, pg_options: object) -> PreparedRank:
    """What can be wrong with this rank alone is found first, so that the others hear of it."""
    place = making.place
    if making.unusable is not None:
        raise making.unusable
    options = read_options(place, pg_options, making.cohorts, sealed=making.secret is not None)
    wanted = host_options(options)
    shared = [cohort.network for cohort in making.cohorts if cohort.host.options == wanted]
    if shared:  # nothing has to be opened, so nothing is looked for
        return PreparedRank(options, shared[0], None, interfaces=[shared[0].interface])
    check_descriptors(place.rank, place.size)
    found = candidates(options.interface, _master(place.store))
    interface = found[0]
    network = attachment(making.place, options, interface)
    mine = PreparedRank(options, network, None, interfaces=found)
    if making.cohorts:
        return mine
    rdma = open_rdma(options, interface)
    making.undo.callback(rdma.close)
    return replace(mine, ends=_open_ends(making, mine, mine.network.payload), rdma=rdma)


def read_options(
    place: Place, pg_options: object, cohorts: Sequence[Cohort], *, sealed: bool
) -> Options:
    """The options of a group whose ranks may meet in one of ``cohorts``.

    ``sealed``: what it sends will be.

    Raises:
        OptionError: They can't be this group's.
    """
    options = with_liveness_of(Options.resolve(pg_options), cohorts)
    check_links(options, place.size)
    logfmt.show(options)
    return options


def _open_ends(making: Making, mine: PreparedRank, payload: int) -> Ends:
    place, address = making.place, mine.network.interface.address
    plane = ControlPlane(place.rank, place.size, mine.options.liveness, secret=making.secret)
    making.undo.callback(plane.close)
    port = plane.open(address, mine.options.ports)
    host = Host(place.rank, place.size, address, payload_bytes=payload, options=mine.options)
    making.undo.callback(host.close)
    sharing = open_sharing(mine.options, place.size)
    making.undo.callback(sharing.close)
    device = mine.network.interface.name
    return Ends(plane, host, (address, port), (address, host.link().port), sharing, device)


def meet(making: Making, pg_options: object) -> Met:
    """All ranks tell one another what they are and have, or why they can't take part."""
    place, rendezvous = making.place, making.rendezvous
    here = Where(place.rank, place.size)
    hello: dict[str, Any] = {}
    failure: LossyError | None = None
    try:
        mine = prepare(making, pg_options)
        hello = _hello(making, mine)
    except LossyError as error:
        failure = error
    except Exception as error:
        failure = refused(place.rank, place.size, error)
    ranks = rendezvous.meet(hello, failure)
    compare_versions(place.rank, [entry.get("version") for entry in ranks])
    compare_options(place.rank, [entry["options"] for entry in ranks])
    compare_sites(here, [entry["site"] for entry in ranks])
    mine = _on_the_network_of(making, mine, ranks)
    cohort, members = _common_cohort(making.cohorts, [entry["roots"] for entry in ranks])
    reach = Reach() if cohort is not None else agree(here, rendezvous, mine.rdma, ranks)
    ends, all_ends = (None, []) if cohort is not None else _ends_of_all(making, mine, ranks, reach)
    if cohort is None:
        _compare_machines(here, all_ends)
    plane = ends.plane if ends is not None else cohort.plane if cohort is not None else None
    assert plane is not None
    return Met(
        session=rendezvous.session,
        options=mine.options,
        network=mine.network,
        definition=place.defined(mine.options),
        number=ranks[0]["group"],
        token=ranks[0]["token"],
        cohort=cohort,
        shares=cohort is not None and all(cohort.session in entry["hosts"] for entry in ranks),
        members=members,
        plane=plane,
        host=None if ends is None else ends.host,
        sharing=None if ends is None else ends.sharing,
        endpoints=tuple(_place(one["control"]) for one in all_ends),
        devices=tuple(str(one.get("device", "")) for one in all_ends),
        links=tuple(_place(one["link"]) for one in all_ends),
        offers=tuple(Offer.from_json(one["offer"]) for one in all_ends),
        rdma=mine.rdma,
        reach=reach,
    )


def _ends_of_all(
    making: Making, mine: PreparedRank, ranks: Sequence[Mapping[str, Any]], reach: Reach
) -> tuple[Ends, Sequence[Mapping[str, Any]]]:
    """A new cohort's sockets here, and where those of all ranks are; open already in most cases."""
    payloads = {entry["payload"] for entry in ranks}
    if reach.payload is not None:
        payloads.add(reach.payload)
    alike = len(payloads) == 1 and not _is_mixed([entry["address"] for entry in ranks])
    if mine.ends is not None and alike and all("link" in entry for entry in ranks):
        return mine.ends, ranks
    # Some had another cohort to offer, have taken another address by now, or can't send so much.
    rendezvous = making.rendezvous
    payload = reach.payload or min(rendezvous.exchange("payload", mine.network.payload))
    ends = mine.ends
    if ends is not None and not (
        ends.control[0] == mine.network.interface.address
        and ends.host.link().payload_bytes == payload
    ):
        ends.close()
        ends = None
    ends = ends or _open_ends(making, mine, payload)
    return ends, rendezvous.exchange("ends", ends.to_json())


def _place(said: Sequence[Any]) -> tuple[str, int]:
    """An address and a port, as JSON has them."""
    return str(said[0]), int(said[1])


def _hello(making: Making, mine: PreparedRank) -> dict[str, Any]:
    """What the other ranks have to know of this one."""
    wanted = host_options(mine.options)
    hello: dict[str, Any] = {
        "address": mine.network.interface.address,
        "addresses": [one.address for one in mine.interfaces],
        "options": mine.options.shared(),
        "version": [version(), wire_version()],
        "roots": {cohort.session: cohort.rank for cohort in making.cohorts},
        "hosts": [one.session for one in making.cohorts if one.host.options == wanted],
        "payload": mine.network.payload,
        "site": mine.options.site,
    }
    if mine.ends is not None:
        hello |= mine.ends.to_json()
    hello["rdma"] = None if mine.rdma is None else mine.rdma.to_json()
    if making.place.rank == 0:
        hello |= {"token": secrets.token_hex(16), "group": fault_group(making.place.name)}
    return hello


def _common_cohort(
    cohorts: Sequence[Cohort], offers: Sequence[Mapping[str, int]]
) -> tuple[Cohort | None, tuple[int, ...]]:
    """The first cohort that every rank offers, and their ranks in it; else None, for a new one."""
    mine = {cohort.session: cohort for cohort in cohorts}
    for session in offers[0]:
        members = tuple(offer.get(session, -1) for offer in offers)
        if session in mine and -1 not in members and len(set(members)) == len(members):
            return mine[session], members
    return None, tuple(range(len(offers)))


def open_engine(making: Making, met: Met) -> DataPath:
    """The group's engine: on the cohort's host, where all can; else on a host of its own."""
    place = making.place
    host = _started(making, met) or _shared_host(making, met) or _own_host(making, met)
    members = met.members if met.shares else tuple(range(place.size))
    engine = EngineGroup(
        host,
        place.rank,
        place.size,
        number=_wire_number(met.session),
        fault_group=met.number,
        options=met.options,
        members=members,
        # Others may be a step behind, and then have no group for what comes early. All of a new
        # cohort have it when their planes have met.
        met=met.cohort is None,
        definition=met.definition.digest,
        name=place.name,
    )
    making.undo.callback(engine.close)
    addresses = [host.addresses[member] for member in members]
    where = Where(place.rank, place.size)
    topology = topology_of(where, host, members, met.options)
    return DataPath(host, engine, host.link(), addresses, topology)


def _started(making: Making, met: Met) -> Host | None:
    if met.host is not None:
        assert met.sharing is not None
        _start(making, met, met.host, met.sharing, met.links, met.offers, met.endpoints)
    return met.host


def _start(
    making: Making,
    met: Met,
    host: Host,
    sharing: Sharing,
    links: Sequence[tuple[str, int]],
    offers: Sequence[Offer],
    listeners: Sequence[tuple[str, int]],
) -> None:
    """Starts a host, once it is known who shares its memory, and who its site."""
    where = Where(making.place.rank, making.place.size)
    with contextlib.closing(sharing):
        shared = share(where, making.rendezvous, host, sharing, offers, met.token)
        topology = shared.topology
        found = met.reach.addresses if met.reach is not None else {}
        reached = {rank: one for rank, one in found.items() if rank not in shared.descriptors}
        if met.rdma is not None:
            met.rdma.hand_over(host, is_used=bool(reached))
        if met.options.site == LEARNT:
            topology = learn_sites(where, making.rendezvous, topology, listeners)
        crowded = is_crowded(where.rank, offers, core_limit())
        if making.secret is not None:
            meeting = making.rendezvous.transcript
            keys = making.secret.path_secrets(meeting, where.rank, where.world)
            host.seal(keys, making.secret.filter(meeting))
            met.plane.sealed.add(host)
        show(making.place, met, host, listeners)
        host.start(
            int(met.session, 16),
            links,
            topology,
            shared.descriptors,
            verbs=reached,
            crowded=crowded,
        )


def _shared_host(making: Making, met: Met) -> Host | None:
    if not met.shares or met.cohort is None:
        return None
    host = met.cohort.host
    held = host.hold()  # the making holds it as well, so it can't be closed by now
    assert held
    making.undo.callback(host.release)
    return host


def _own_host(making: Making, met: Met) -> Host:
    """Of a group whose cohort's host isn't what it asks for."""
    place, rendezvous = making.place, making.rendezvous
    payload = min(rendezvous.exchange("payload", met.network.payload))
    address = met.network.interface.address
    host = Host(place.rank, place.size, address, payload_bytes=payload, options=met.options)
    making.undo.callback(host.release)
    sharing = open_sharing(met.options, place.size)
    making.undo.callback(sharing.close)
    mine = {"link": [address, host.link().port], "offer": sharing.offer.to_json()}
    said = rendezvous.exchange("links", mine)
    links = [_place(one["link"]) for one in said]
    offers = [Offer.from_json(one["offer"]) for one in said]
    listeners = [met.plane.place_of(member) for member in met.members]
    _start(making, met, host, sharing, links, offers, listeners)
    return host


def _wire_number(session: str) -> int:
    """The group's number in packets: of its own rendezvous, so no other group's; not 0."""
    return int(session, 16) % (2**32 - 1) + 1


def become_member(making: Making, met: Met) -> Membership:
    """A membership of the cohort's plane, which tells the others if this rank fails from now on.

    They have met this rank, so nothing in the store would keep them from waiting for it.
    """
    return member_of(
        making.undo,
        met.plane,
        met.session,
        met.members,
        outlive=met.options.continues,
        definition=met.definition,
    )


def member_of(
    undo: contextlib.ExitStack,
    plane: ControlPlane,
    session: str,
    members: Sequence[int],
    *,
    outlive: bool = False,
    definition: Definition | None = None,
) -> Membership:
    """This rank's place in the group ``session``. If ``undo`` runs by an error, all hear of it."""
    membership = Membership(
        plane, int(session, 16), members, outlive=outlive, definition=definition
    )
    undo.callback(membership.close)

    def tell(kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            membership.abort(str(error) or type(error).__name__, kind_of_unmade(error))

    undo.push(tell)
    return membership


def join(making: Making, met: Met, host: Host, membership: Membership) -> Joined:
    """Starts a new cohort's plane, now that this rank has the group's engine."""
    if met.cohort is not None:
        return Joined(membership, None)
    met.plane.cohort.pulse = host.pulse
    met.plane.start(met.token, met.endpoints)
    tell(met.plane, met, host)
    place = making.place
    founded = Cohort(met.session, place.rank, place.global_ranks, met.plane, host, met.network)
    return Joined(membership, founded)


def enter(making: Making, met: Met, joined: Joined, endpoint: Endpoint) -> None:
    """From now on the group hears of what happens. All ranks of a new cohort have met then.

    Raises:
        LossyError: The group's failure, where a rank died meanwhile.
        RendezvousError: The ranks can't reach one another.
    """
    cohort = joined.founded
    if cohort is not None:
        listener = MeetingListener(endpoint, lambda: cohort.plane.has_met)
        joined.membership.open(listener)
        Meeting(making, met, cohort.plane, endpoint.health, listener.unmet).wait()
        COHORTS.add(cohort)
        return
    joined.membership.open(GroupListener(endpoint), wait=not met.all_here)
    if endpoint.health.failure is not None:
        raise endpoint.health.failure


def tell_ready(health: Health, met: Met, data: DataPath, ranks: Sequence[int]) -> None:
    """Logs what the group was made with; as debug where an earlier one has the same socket, since
    a mesh has dozens of those."""
    logfmt.event(
        logging.DEBUG if met.shares else logging.INFO,
        health.where,
        "ready",
        **({"ranks": ",".join(map(str, ranks))} if met.shares else {}),
        address=data.addresses[health.where.rank],
        dev=met.network.interface.name,
        mtu=met.network.mtu,
        payload=data.link.payload_bytes,
        fast=",".join(data.link.active) or "none",
        buffers=data.link.receive_buffer,
        **fields_of_seal(
            data.host, met.options, met.plane.place_of(met.members[health.where.rank])
        ),
        **_who_is_near(data.topology, health.where.rank, met.options),
        **({"inject": met.options.inject} if met.options.inject else {}),
    )
    if not data.host.is_sealed:
        warn_of_clear(health.where, data.addresses)


def _who_is_near(topology: Topology, rank: int, options: Options) -> dict[str, Any]:
    """Fields of ``ready``, where hosts or sites are shared."""
    fields: dict[str, Any] = {}
    if not topology.is_flat:
        fields["algorithm"] = name_of(options, topology)
    if topology.shares_hosts:
        here = topology.members_of_hosts[topology.hosts[rank]]
        fields |= {"hosts": topology.n_hosts, "local": ",".join(map(str, here))}
    return fields | ({"sites": topology.n_sites} if topology.n_sites > 1 else {})


def check_links(options: Options, size: int) -> None:
    """Raises OptionError when injection is told of a rank that the group doesn't have."""
    try:
        faults.parse(options.inject).check_world(size)
    except ValueError as error:
        raise OptionError(
            f"option inject is {options.inject!r}, but {error}; a group of other ranks than the "
            f"job's takes its own from pg_options"
        ) from None


def _master(store: Store) -> str | None:
    """Host of the store's server, or MASTER_ADDR; None if there is none (a file, say)."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return str(host) if host else os.environ.get("MASTER_ADDR")


def fault_group(name: str) -> int:
    """A 32-bit number for a group's name; the same in every run, since it keys injected faults."""
    return int(name) if name.isdecimal() and len(name) < 9 else zlib.crc32(name.encode())


def _is_mixed(addresses: Sequence[str]) -> bool:
    """Whether some of the addresses are loopback's or of IPv6, and others not."""
    found = [Interface("", address, 0) for address in addresses]
    return len({(one.loopback, one.version) for one in found}) > 1


def _on_the_network_of(
    making: Making, mine: PreparedRank, ranks: Sequence[Mapping[str, Any]]
) -> PreparedRank:
    """This rank with an address of the family that all have, and that the others can reach.

    The master's name may have addresses of both families, and a host only one of them. The master's
    own host may know the master as loopback, where no other host can reach it: then this rank takes
    the address that routes to a peer's.
    """
    offered = [entry.get("addresses") or [entry["address"]] for entry in ranks]
    version = common_version(making.who, offered)
    alike = [
        one
        for one in (Interface("", address, 0) for addresses in offered for address in addresses)
        if one.version == version and not one.loopback
    ]
    interface = next((one for one in mine.interfaces if one.version == version), None)
    is_inner = interface is None or interface.loopback
    if is_inner and alike and mine.options.interface == "auto":
        interface = choose("auto", alike[0].address)
    if interface is None or interface == mine.network.interface:
        return mine
    return replace(mine, network=attachment(making.place, mine.options, interface))


def _compare_machines(here: Where, ends: Sequence[Mapping[str, Any]]) -> None:
    """Two machines of one address can't be told apart by it."""
    offers = [Offer.from_json(one["offer"]) for one in ends]
    machines = [(m.boot, m.network) if (m := one.machine) else None for one in offers]
    addresses = [str(one["control"][0]) for one in ends]
    compare_machines(str(here), addresses, machines, [str(one.get("device", "")) for one in ends])
