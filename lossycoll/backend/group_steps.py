"""The steps by which a group is made: each returns what it has made, and what it is made of.

A step that needs the other ranks goes through the rendezvous, in the same order on all of them.
What a step has opened is closed by ``GroupBuilder.undo`` if a later one fails.
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
from lossycoll.runtime.net.cores import core_limit
from lossycoll.runtime.net.interfaces import Interface, candidates, choose
from lossycoll.runtime.world.control_plane import ControlPlane
from lossycoll.runtime.world.definition import (
    Definition,
    compare_options,
    compare_versions,
)
from lossycoll.runtime.world.error_kinds import kind_of_unmade
from lossycoll.runtime.world.group_state import Health
from lossycoll.runtime.world.membership import Membership
from lossycoll.runtime.world.reachability import common_version, compare_machines

from .builder import DataPath, Ends, GroupBuilder, GroupSpec, Joined, Met, PreparedRank
from .group_listener import GroupListener, MeetingListener
from .meeting import Meeting
from .packet_size import attachment
from .rdma import Reach, agree, open_rdma
from .resource_limits import check_descriptors, refused
from .sealing import fields_of_seal, warn_of_clear
from .sharing import Offer, Sharing, is_crowded, open_sharing, share, topology_of
from .sites import LEARNT, compare_sites, learn_sites
from .status import show, tell
from .worlds import WORLDS, World, with_liveness_of

log: Final = logging.getLogger("lossycoll")


def prepare(builder: GroupBuilder, pg_options: object) -> PreparedRank:
    """What can be wrong with this rank alone is found first, so that the others hear of it."""
    spec = builder.spec
    if builder.unusable is not None:
        raise builder.unusable
    options = read_options(spec, pg_options, builder.worlds, sealed=builder.secret is not None)
    wanted = host_options(options)
    shared = [world.network for world in builder.worlds if world.host.options == wanted]
    if shared:  # nothing has to be opened, so nothing is looked for
        return PreparedRank(options, shared[0], None, interfaces=[shared[0].interface])
    check_descriptors(spec.rank, spec.size)
    found = candidates(options.interface, _master(spec.store))
    interface = found[0]
    network = attachment(builder.spec, options, interface)
    mine = PreparedRank(options, network, None, interfaces=found)
    if builder.worlds:
        return mine
    rdma = open_rdma(options, interface)
    builder.undo.callback(rdma.close)
    return replace(mine, ends=_open_ends(builder, mine, mine.network.payload), rdma=rdma)


def read_options(
    spec: GroupSpec, pg_options: object, worlds: Sequence[World], *, sealed: bool
) -> Options:
    """The options of a group whose ranks may meet in one of ``worlds``.

    ``sealed``: what it sends will be.
    """
    options = with_liveness_of(Options.resolve(pg_options), worlds)
    check_links(options, spec.size)
    logfmt.show(options)
    return options


def _open_ends(builder: GroupBuilder, mine: PreparedRank, payload: int) -> Ends:
    spec, address = builder.spec, mine.network.interface.address
    plane = ControlPlane(spec.rank, spec.size, mine.options.liveness, secret=builder.secret)
    builder.undo.callback(plane.close)
    port = plane.open(address, mine.options.ports)
    host = Host(spec.rank, spec.size, address, payload_bytes=payload, options=mine.options)
    builder.undo.callback(host.close)
    sharing = open_sharing(mine.options, spec.size)
    builder.undo.callback(sharing.close)
    device = mine.network.interface.name
    return Ends(plane, host, (address, port), (address, host.link().port), sharing, device)


def meet(builder: GroupBuilder, pg_options: object) -> Met:
    """All ranks tell one another what they are and have, or why they can't take part."""
    spec, rendezvous = builder.spec, builder.rendezvous
    here = Where(spec.rank, spec.size)
    hello: dict[str, Any] = {}
    failure: LossyError | None = None
    try:
        mine = prepare(builder, pg_options)
        hello = _hello(builder, mine)
    except LossyError as error:
        failure = error
    except Exception as error:
        failure = refused(spec.rank, spec.size, error)
    ranks = rendezvous.meet(hello, failure)
    compare_versions(spec.rank, [entry.get("version") for entry in ranks])
    compare_options(spec.rank, [entry["options"] for entry in ranks])
    compare_sites(here, [entry["site"] for entry in ranks])
    mine = _on_the_network_of(builder, mine, ranks)
    world, members = _common_world(builder.worlds, [entry["roots"] for entry in ranks])
    reach = Reach() if world is not None else agree(here, rendezvous, mine.rdma, ranks)
    ends, all_ends = (None, []) if world is not None else _ends_of_all(builder, mine, ranks, reach)
    if world is None:
        _compare_machines(here, all_ends)
    plane = ends.plane if ends is not None else world.plane if world is not None else None
    assert plane is not None
    return Met(
        session=rendezvous.session,
        options=mine.options,
        network=mine.network,
        definition=spec.defined(mine.options),
        number=ranks[0]["group"],
        token=ranks[0]["token"],
        world=world,
        shares=world is not None and all(world.session in entry["hosts"] for entry in ranks),
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
    builder: GroupBuilder, mine: PreparedRank, ranks: Sequence[Mapping[str, Any]], reach: Reach
) -> tuple[Ends, Sequence[Mapping[str, Any]]]:
    """A new world's sockets here, and where those of all ranks are; open already in most cases."""
    payloads = {entry["payload"] for entry in ranks}
    if reach.payload is not None:
        payloads.add(reach.payload)
    alike = len(payloads) == 1 and not _is_mixed([entry["address"] for entry in ranks])
    if mine.ends is not None and alike and all("link" in entry for entry in ranks):
        return mine.ends, ranks
    # Some had another world to offer, have taken another address by now, or can't send so much.
    rendezvous = builder.rendezvous
    payload = reach.payload or min(rendezvous.exchange("payload", mine.network.payload))
    ends = mine.ends
    if ends is not None and not (
        ends.control[0] == mine.network.interface.address
        and ends.host.link().payload_bytes == payload
    ):
        ends.close()
        ends = None
    ends = ends or _open_ends(builder, mine, payload)
    return ends, rendezvous.exchange("ends", ends.to_json())


def _place(said: Sequence[Any]) -> tuple[str, int]:
    """An address and a port, as JSON has them."""
    return str(said[0]), int(said[1])


def _hello(builder: GroupBuilder, mine: PreparedRank) -> dict[str, Any]:
    """What the other ranks have to know of this one."""
    wanted = host_options(mine.options)
    hello: dict[str, Any] = {
        "address": mine.network.interface.address,
        "addresses": [one.address for one in mine.interfaces],
        "options": mine.options.shared(),
        "version": [version(), wire_version()],
        "roots": {world.session: world.rank for world in builder.worlds},
        "hosts": [one.session for one in builder.worlds if one.host.options == wanted],
        "payload": mine.network.payload,
        "site": mine.options.site,
    }
    if mine.ends is not None:
        hello |= mine.ends.to_json()
    hello["rdma"] = None if mine.rdma is None else mine.rdma.to_json()
    if builder.spec.rank == 0:
        hello |= {"token": secrets.token_hex(16), "group": fault_group(builder.spec.name)}
    return hello


def _common_world(
    worlds: Sequence[World], offers: Sequence[Mapping[str, int]]
) -> tuple[World | None, tuple[int, ...]]:
    """The first world that every rank offers, and their ranks in it; else None, for a new one."""
    mine = {world.session: world for world in worlds}
    for session in offers[0]:
        members = tuple(offer.get(session, -1) for offer in offers)
        if session in mine and -1 not in members and len(set(members)) == len(members):
            return mine[session], members
    return None, tuple(range(len(offers)))


def open_engine(builder: GroupBuilder, met: Met) -> DataPath:
    """The group's engine: on the world's host, where all can; else on a host of its own."""
    spec = builder.spec
    host = _started(builder, met) or _shared_host(builder, met) or _own_host(builder, met)
    members = met.members if met.shares else tuple(range(spec.size))
    engine = EngineGroup(
        host,
        spec.rank,
        spec.size,
        number=_wire_number(met.session),
        fault_group=met.number,
        options=met.options,
        members=members,
        # Others may be a step behind, and then have no group for what comes early. All of a new
        # world have it when their planes have met.
        met=met.world is None,
        definition=met.definition.digest,
        name=spec.name,
    )
    builder.undo.callback(engine.close)
    addresses = [host.addresses[member] for member in members]
    where = Where(spec.rank, spec.size)
    topology = topology_of(where, host, members, met.options)
    return DataPath(host, engine, host.link(), addresses, topology)


def _started(builder: GroupBuilder, met: Met) -> Host | None:
    if met.host is not None:
        assert met.sharing is not None
        _start(builder, met, met.host, met.sharing, met.links, met.offers, met.endpoints)
    return met.host


def _start(
    builder: GroupBuilder,
    met: Met,
    host: Host,
    sharing: Sharing,
    links: Sequence[tuple[str, int]],
    offers: Sequence[Offer],
    listeners: Sequence[tuple[str, int]],
) -> None:
    """Starts a host, once it is known who shares its memory, and who its site."""
    where = Where(builder.spec.rank, builder.spec.size)
    with contextlib.closing(sharing):
        shared = share(where, builder.rendezvous, host, sharing, offers, met.token)
        topology = shared.topology
        found = met.reach.addresses if met.reach is not None else {}
        reached = {rank: one for rank, one in found.items() if rank not in shared.descriptors}
        if met.rdma is not None:
            met.rdma.hand_over(host, is_used=bool(reached))
        if met.options.site == LEARNT:
            topology = learn_sites(where, builder.rendezvous, topology, listeners)
        crowded = is_crowded(where.rank, offers, core_limit())
        if builder.secret is not None:
            meeting = builder.rendezvous.transcript
            keys = builder.secret.path_secrets(meeting, where.rank, where.world)
            host.seal(keys, builder.secret.filter(meeting))
            met.plane.sealed.add(host)
        show(builder.spec, met, host, listeners)
        host.start(
            int(met.session, 16),
            links,
            topology,
            shared.descriptors,
            verbs=reached,
            crowded=crowded,
        )


def _shared_host(builder: GroupBuilder, met: Met) -> Host | None:
    if not met.shares or met.world is None:
        return None
    host = met.world.host
    held = host.hold()  # the builder holds it as well, so it can't be closed by now
    assert held
    builder.undo.callback(host.release)
    return host


def _own_host(builder: GroupBuilder, met: Met) -> Host:
    """Of a group whose world's host isn't what it asks for."""
    spec, rendezvous = builder.spec, builder.rendezvous
    payload = min(rendezvous.exchange("payload", met.network.payload))
    address = met.network.interface.address
    host = Host(spec.rank, spec.size, address, payload_bytes=payload, options=met.options)
    builder.undo.callback(host.release)
    sharing = open_sharing(met.options, spec.size)
    builder.undo.callback(sharing.close)
    mine = {"link": [address, host.link().port], "offer": sharing.offer.to_json()}
    said = rendezvous.exchange("links", mine)
    links = [_place(one["link"]) for one in said]
    offers = [Offer.from_json(one["offer"]) for one in said]
    listeners = [met.plane.place_of(member) for member in met.members]
    _start(builder, met, host, sharing, links, offers, listeners)
    return host


def _wire_number(session: str) -> int:
    """The group's number in packets: of its own rendezvous, so no other group's; not 0."""
    return int(session, 16) % (2**32 - 1) + 1


def become_member(builder: GroupBuilder, met: Met) -> Membership:
    """A membership of the world's plane, which tells the others if this rank fails from now on.

    They have met this rank, so nothing in the store would keep them from waiting for it.
    """
    return member_of(
        builder.undo,
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


def join(builder: GroupBuilder, met: Met, host: Host, membership: Membership) -> Joined:
    """Starts a new world's plane, now that this rank has the group's engine."""
    if met.world is not None:
        return Joined(membership, None)
    met.plane.protocol.pulse = host.pulse
    met.plane.start(met.token, met.endpoints)
    tell(met.plane, met, host)
    spec = builder.spec
    founded = World(met.session, spec.rank, spec.global_ranks, met.plane, host, met.network)
    return Joined(membership, founded)


def enter(builder: GroupBuilder, met: Met, joined: Joined, endpoint: Endpoint) -> None:
    """From now on the group hears of what happens. All ranks of a new world have met then."""
    world = joined.founded
    if world is not None:
        listener = MeetingListener(endpoint, lambda: world.plane.has_met)
        joined.membership.open(listener)
        Meeting(builder, met, world.plane, endpoint.health, listener.lost_early).wait()
        WORLDS.add(world)
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
    builder: GroupBuilder, mine: PreparedRank, ranks: Sequence[Mapping[str, Any]]
) -> PreparedRank:
    """This rank with an address of the family that all have, and that the others can reach.

    The master's name may have addresses of both families, and a host only one of them. The master's
    own host may know the master as loopback, where no other host can reach it: then this rank takes
    the address that routes to a peer's.
    """
    offered = [entry.get("addresses") or [entry["address"]] for entry in ranks]
    version = common_version(builder.who, offered)
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
    return replace(mine, network=attachment(builder.spec, mine.options, interface))


def _compare_machines(here: Where, ends: Sequence[Mapping[str, Any]]) -> None:
    """Two machines of one address can't be told apart by it."""
    offers = [Offer.from_json(one["offer"]) for one in ends]
    machines = [(m.boot, m.network) if (m := one.machine) else None for one in offers]
    addresses = [str(one["control"][0]) for one in ends]
    compare_machines(str(here), addresses, machines, [str(one.get("device", "")) for one in ends])
