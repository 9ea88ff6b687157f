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
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import PrefixStore, Store

from lossycoll.errors import LossyError, OptionError, RendezvousError
from lossycoll.options.fields import Options
from lossycoll.plan import faults
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.core import logfmt
from lossycoll.runtime.engine.binding import Engine, version, wire_version
from lossycoll.runtime.engine.host import Host, host_options
from lossycoll.runtime.engine.reports import LinkInfo
from lossycoll.runtime.membership.control_plane import ControlPlane
from lossycoll.runtime.membership.group_state import Health
from lossycoll.runtime.membership.membership import Membership
from lossycoll.runtime.membership.rendezvous import (
    Rendezvous,
    compare_options,
    compare_versions,
)
from lossycoll.runtime.net.buffers import fitting_payload, packets_per_peer, receive_buffer
from lossycoll.runtime.net.interfaces import Interface, choose
from lossycoll.runtime.net.payload import AUTO_MTU_MAX, payload_bytes
from lossycoll.runtime.p2p.endpoint import Messages

from .resource_limits import check_descriptors, refused
from .roots import ROOTS, Root, with_liveness_of

log: Final = logging.getLogger("lossycoll")


@dataclass(frozen=True)
class Place:
    """Where this process stands: a rank of a group.

    Attributes:
        store: The group's, with keys of earlier groups maybe.
        rank: This process's.
        size: The group's ranks.
        timeout: The group's.
        name: torch's name of the group.
        global_ranks: torch's global rank of each rank of the group.
    """

    store: Store
    rank: int
    size: int
    timeout: timedelta
    name: str
    global_ranks: tuple[int, ...]


@dataclass(frozen=True)
class Making:
    """A group that is being made. ``roots``: where all its members have met before, held."""

    place: Place
    rendezvous: Rendezvous
    undo: contextlib.ExitStack
    roots: Sequence[Root]

    @property
    def who(self) -> str:
        """This rank, as errors name it."""
        return f"rank {self.place.rank}/{self.place.size}"


@dataclass(frozen=True)
class Prepared:
    """What this rank has by itself. ``plane``: a new root's, where there may be one."""

    options: Options
    interface: Interface
    plane: ControlPlane | None
    port: int


@dataclass(frozen=True)
class Met:
    """What all ranks have said. ``root``: where they meet, None: in a new one.

    Attributes:
        session: This group's, of 16 hex digits, equal on all ranks.
        options: This rank's.
        interface: Where it sends and receives.
        mtu: The largest packet that it can send.
        number: The group's, which keys injected faults.
        token: The group's secret.
        root: Where all have met before; None: they make a new root.
        shares: The group is made on the root's host, as none asks for another.
        members: The group's ranks, as ranks of the root.
        plane: A new root's.
        endpoints: Where the new root's planes listen.
    """

    session: str
    options: Options
    interface: Interface
    mtu: int
    number: int
    token: str
    root: Root | None
    shares: bool
    members: tuple[int, ...]
    plane: ControlPlane
    endpoints: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class DataPath:
    """The engine's host and group, and where each rank's is."""

    host: Host
    engine: Engine
    link: LinkInfo
    addresses: Sequence[str]


@dataclass(frozen=True)
class Joined:
    """This rank's membership; ``founded``: the root that begins with it."""

    membership: Membership
    founded: Root | None


def prepare(making: Making, pg_options: object) -> Prepared:
    """What can be wrong with this rank alone is found first, so that the others hear of it."""
    place = making.place
    options = with_liveness_of(Options.resolve(pg_options), making.roots)
    check_links(options, place.size)
    logfmt.show(options)
    check_descriptors(place.rank, place.size)
    interface = choose(options.interface, _master(place.store))
    if making.roots:
        return Prepared(options, interface, None, 0)
    plane, port = _open_plane(making, options, interface)
    return Prepared(options, interface, plane, port)


def _open_plane(making: Making, options: Options, interface: Interface) -> tuple[ControlPlane, int]:
    plane = ControlPlane(making.place.rank, making.place.size, options.liveness)
    making.undo.callback(plane.close)
    return plane, plane.open(interface.address, options.ports)


def meet(making: Making, pg_options: object) -> Met:
    """All ranks tell one another what they are and have, or why they can't take part."""
    place, rendezvous = making.place, making.rendezvous
    hello: dict[str, Any] = {}
    failure: LossyError | None = None
    try:
        mine = prepare(making, pg_options)
        hello = {"address": mine.interface.address, "options": mine.options.shared()}
        hello["version"] = [version(), wire_version()]
        hello["roots"] = {root.session: root.rank for root in making.roots}
        wanted = host_options(mine.options)
        hello["hosts"] = [one.session for one in making.roots if one.host.options == wanted]
        if mine.plane is not None:
            hello["control"] = [mine.interface.address, mine.port]
        if place.rank == 0:
            hello["token"] = secrets.token_hex(16)
            hello["group"] = _number(place.name)
    except LossyError as error:
        failure = error
    except Exception as error:
        failure = refused(place.rank, place.size, error)
    ranks = rendezvous.meet(hello, failure)
    compare_versions(place.rank, [entry.get("version") for entry in ranks])
    compare_options(place.rank, [entry["options"] for entry in ranks])
    addresses = [entry["address"] for entry in ranks]
    interface = _same_network(mine.interface, mine.options, addresses)
    root, members = _common_root(making.roots, [entry["roots"] for entry in ranks])
    plane, endpoints = mine.plane, [entry.get("control") for entry in ranks]
    if root is not None:
        plane = root.plane
    elif None in endpoints or _is_mixed(addresses):
        # Some had another root to offer, or have taken another address by now.
        plane, port = mine.plane, mine.port
        if plane is None or interface.address != mine.interface.address:
            plane, port = _open_plane(making, mine.options, interface)
        endpoints = rendezvous.exchange("control", [interface.address, port])
    assert plane is not None
    return Met(
        session=rendezvous.session,
        options=mine.options,
        interface=interface,
        mtu=_mtu(making, mine.options, interface),
        number=ranks[0]["group"],
        token=ranks[0]["token"],
        root=root,
        shares=root is not None and all(root.session in entry["hosts"] for entry in ranks),
        members=members,
        plane=plane,
        endpoints=tuple((str(end[0]), int(end[1])) for end in endpoints if end is not None),
    )


def _common_root(
    roots: Sequence[Root], offers: Sequence[Mapping[str, int]]
) -> tuple[Root | None, tuple[int, ...]]:
    """The first root that every rank offers, and their ranks in it; else None, for a new one."""
    mine = {root.session: root for root in roots}
    for session in offers[0]:
        members = tuple(offer.get(session, -1) for offer in offers)
        if session in mine and -1 not in members and len(set(members)) == len(members):
            return mine[session], members
    return None, tuple(range(len(offers)))


def _mtu(making: Making, options: Options, interface: Interface) -> int:
    mtu = options.mtu or min(interface.mtu, AUTO_MTU_MAX)
    if mtu > interface.mtu:
        log.warning(
            "%s: option mtu is %d, but that of %s is %d: larger packets are "
            "refused; lower LOSSYCOLL_MTU, or raise that of the interface",
            making.who,
            mtu,
            interface,
            interface.mtu,
        )
    return mtu


def open_engine(making: Making, met: Met) -> DataPath:
    """The group's engine: on the root's host, where all can; else on a host of its own."""
    place = making.place
    host = _shared_host(making, met) or _own_host(making, met)
    members = met.members if met.shares else tuple(range(place.size))
    engine = Engine(
        host,
        place.rank,
        place.size,
        number=_wire_number(met.session),
        faults=met.number,
        options=met.options,
        members=members,
        # Whoever shares a host may be a step behind, and then has no group for what comes early.
        met=not met.shares,
    )
    making.undo.callback(engine.close)
    return DataPath(host, engine, host.link(), [host.addresses[member] for member in members])


def _shared_host(making: Making, met: Met) -> Host | None:
    if not met.shares or met.root is None:
        return None
    host = met.root.host
    held = host.hold()  # the making holds it as well, so it can't be closed by now
    assert held
    making.undo.callback(host.release)
    return host


def _own_host(making: Making, met: Met) -> Host:
    """Opened with the payload that suits all ranks, and connected with theirs."""
    place, rendezvous = making.place, making.rendezvous
    payload = _payload(place, met.options, met.interface, met.mtu)
    address = met.interface.address
    host = Host(
        place.rank,
        place.size,
        address,
        payload_bytes=min(rendezvous.exchange("payload", payload)),
        options=met.options,
    )
    making.undo.callback(host.release)
    links = rendezvous.exchange("links", [address, host.link().port])
    host.start(int(met.session, 16), [(str(name), int(port)) for name, port in links])
    return host


def _wire_number(session: str) -> int:
    """The group's number in packets: of its own rendezvous, so no other group's; not 0."""
    return int(session, 16) % (2**32 - 1) + 1


def open_messages(making: Making, met: Met) -> Messages:
    """The group's point to point, which listens from now on."""
    place, address = making.place, met.interface.address
    messages = Messages(
        place.rank, place.size, token=met.token, address=address, ports=met.options.ports
    )
    making.undo.callback(messages.close)
    return messages


def join(making: Making, met: Met, host: Host) -> Joined:
    """A membership of the root's plane; the plane itself begins in :func:`enter`."""
    membership = Membership(
        met.plane, int(met.session, 16), met.members, outlive=met.options.continues
    )
    making.undo.callback(membership.close)
    if met.root is not None:
        return Joined(membership, None)
    met.plane.start(met.token, met.endpoints)
    place = making.place
    return Joined(membership, Root(met.session, place.rank, place.global_ranks, met.plane, host))


def enter(making: Making, joined: Joined, communicator: Endpoint) -> None:
    """From now on the group hears of what happens. All ranks of a new root have met then.

    Raises:
        LossyError: The group's failure, where a rank died meanwhile.
        RendezvousError: The ranks can't reach one another.
    """
    joined.membership.open(GroupListener(communicator))
    root = joined.founded
    if root is not None and not root.plane.meet(making.place.timeout.total_seconds()):
        raise communicator.health.failure or RendezvousError(
            f"{making.who}: no control connection with ranks {root.plane.missing()} after "
            f"{making.place.timeout.total_seconds():g} s; can all reach one another's TCP ports?"
        )
    if root is not None:
        ROOTS.add(root)
    elif communicator.health.failure is not None:
        raise communicator.health.failure


def tell_ready(health: Health, met: Met, data: DataPath) -> None:
    """Logs what the group was made with."""
    logfmt.event(
        logging.INFO,
        health.where,
        "ready",
        address=data.addresses[health.where.rank],
        dev=met.interface.name,
        mtu=met.mtu,
        payload=data.link.payload_bytes,
        fast=",".join(data.link.active) or "none",
        buffers=data.link.receive_buffer,
        **({"inject": met.options.inject} if met.options.inject else {}),
    )


class GroupListener:
    """What the control plane talks to: the health, and the communicator's figures."""

    def __init__(self, communicator: Endpoint) -> None:
        health = communicator.health
        self._communicator = communicator
        self.on_dead = health.on_dead
        self.on_abort = health.on_abort
        self.on_broken = health.on_broken
        self.on_bye = health.on_bye
        self.on_mismatch = health.on_mismatch
        self.call_at = health.call_at
        self.figures = communicator.figures
        self.on_beat = communicator.figures  # it warns of what it finds
        self.on_views = communicator.go_on
        self.on_apart = health.on_apart

    def on_lost(self, rank: int, silent: float, ended: bool) -> int:
        self._communicator.health.on_lost(rank, silent, ended)
        return self._communicator.lose(rank)


def check_links(options: Options, size: int) -> None:
    """Raises OptionError when injection is told of a rank that the group doesn't have."""
    try:
        faults.parse(options.inject).check_world(size)
    except ValueError as error:
        raise OptionError(
            f"option inject is {options.inject!r}, but {error}; a group of other ranks than the "
            f"job's takes its own from pg_options"
        ) from None


def _payload(place: Place, options: Options, interface: Interface, mtu: int) -> int:
    """Data bytes per packet that suit this rank: its MTU and its receive buffer."""
    largest = payload_bytes(mtu, interface.version)
    buffer = receive_buffer(options.socket_buffer, interface.version)
    payload = fitting_payload(largest, buffer, place.size)
    if packets_per_peer(payload, buffer, place.size) < 1:
        log.warning(
            "rank %d/%d: the receive buffer of %d bytes can't hold one packet of each of the %d "
            "other ranks, so some will be lost; raise sysctl net.core.rmem_max, and "
            "LOSSYCOLL_SOCKET_BUFFER if that is set",
            place.rank,
            place.size,
            buffer,
            place.size - 1,
        )
    return payload


def _master(store: Store) -> str | None:
    """Host of the store's server, or MASTER_ADDR; None if there is none (a file, say)."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return str(host) if host else os.environ.get("MASTER_ADDR")


def _number(name: str) -> int:
    """A 32-bit number for a group's name; the same in every run, since it keys injected faults."""
    return int(name) if name.isdecimal() and len(name) < 9 else zlib.crc32(name.encode())


def _is_mixed(addresses: Sequence[str]) -> bool:
    """Whether some of the addresses are loopback's, and others not."""
    return len({Interface("", address, 0).loopback for address in addresses}) > 1


def _same_network(interface: Interface, options: Options, addresses: list[str]) -> Interface:
    """The master's own host may know the master as loopback, where no other host can reach it.

    Then this rank takes the address that routes to a peer's.
    """
    elsewhere = [a for a in addresses if not Interface("", a, 0).loopback]
    if interface.loopback and elsewhere and options.interface == "auto":
        return choose("auto", elsewhere[0])
    return interface
