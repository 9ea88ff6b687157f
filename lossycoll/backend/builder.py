"""A group that is being made, and the worlds of this process that it may be made in.

A world are the processes that met in one rendezvous, with a control plane among them. A group whose
members have all met before needs no connections of its own: it is a membership of their world's
plane. Where all of them are of one group (its *parent*), they need not even meet: each knows by
itself which world that is. A plane lasts as long as its last membership; a forked child has none.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from hashlib import blake2b
from typing import Any, Final, NamedTuple

from torch._C._distributed_c10d import Store

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.runtime.core.logfmt import log
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.engine.payload import AUTO_MTU_MAX, payload_bytes
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.net.buffers import fitting_payload, packets_per_peer, receive_buffer
from lossycoll.runtime.net.interfaces import Interface
from lossycoll.runtime.world.control_plane import ControlPlane
from lossycoll.runtime.world.membership import Membership
from lossycoll.runtime.world.messages import Defined
from lossycoll.runtime.world.rendezvous import Rendezvous

from .rdma import Rdma, Reach
from .sharing import Offer, Sharing


@dataclass(frozen=True, slots=True)
class Attachment:
    """Network attachment of a process: the interface, its largest packet, and the data in one."""

    interface: Interface
    mtu: int
    payload: int


@dataclass(frozen=True, slots=True)
class World:
    """The processes that met in one rendezvous."""

    session: str  # The rendezvous's, of 16 hex digits; no other world has it
    rank: int  # This process's number in it
    global_ranks: tuple[int, ...]  # torch's global rank of each, by its number in the world
    plane: ControlPlane  # This process's control plane among them
    host: Host  # The engine's socket and thread, which its groups share
    network: Attachment  # What that host sends through

    def holds(self, global_ranks: Sequence[int]) -> bool:
        """True if all of these are here, as far as this process knows."""
        numbers = {other: number for number, other in enumerate(self.global_ranks)}
        return (
            self.plane.is_sound
            and self.host.is_open
            and all(rank in numbers and self.plane.is_here(numbers[rank]) for rank in global_ranks)
        )

    def hold(self) -> bool:
        """Keeps plane and host from their end until ``release``. False: one of them is ending."""
        if not self.plane.hold():
            return False
        if self.host.hold():
            return True
        self.plane.release()
        return False

    def release(self) -> None:
        """Undoes ``hold``."""
        self.host.release()
        self.plane.release()


@dataclass(frozen=True, slots=True, eq=False)
class Parent:
    """The group that all ranks of a new one belong to: torch's default group, or a split one."""

    world: World  # The parent's, on all of its ranks
    numbers: Mapping[int, int]  # Its ranks as ranks of the world, by torch's global rank
    session: str  # The parent's, of 16 hex digits; members that change get another one
    _names: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next_session(self, name: str) -> str:
        """Number of this rank's next group of that name, 16 hex digits, equal on all its ranks."""
        with self._lock:
            text = f"{self.session}/{self._names[name]}/{name}"
            self._names[name] += 1
        return blake2b(text.encode(), digest_size=8).hexdigest()


class Worlds:
    """A process's worlds, oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worlds: list[World] = []

    def add(self, world: World) -> None:
        """Offers ``world`` to groups that are made later, for as long as its plane lasts."""
        with self._lock:
            self._worlds = [one for one in self._worlds if one.plane.is_sound and one.host.is_open]
            self._worlds.append(world)

    @contextlib.contextmanager
    def holding(self, global_ranks: Sequence[int]) -> Iterator[list[World]]:
        """The worlds that have all of ``global_ranks``, held until the context ends."""
        with self._lock:
            found = [world for world in self._worlds if world.holds(global_ranks)]
        with contextlib.ExitStack() as stack:
            held = [world for world in found if world.hold()]
            for world in held:
                stack.callback(world.release)
            yield held


def written_in(pg_options: object) -> Collection[str]:
    """Names of the options that are written for this group; the environment's are for all."""
    if isinstance(pg_options, Options):
        return pg_options.given
    return list(pg_options) if isinstance(pg_options, Mapping) else ()


def with_liveness_of(options: Options, pg_options: object, worlds: Sequence[World]) -> Options:
    """``options`` of a group whose process belongs to ``worlds`` already. The liveness is the
    process's: it was read when the world was made. ``pg_options``: what is written for the
    group, which mustn't be another one."""
    if not worlds:
        return options
    liveness = worlds[0].plane.liveness
    if options.liveness == liveness:
        return options
    if "liveness" in written_in(pg_options):
        raise OptionError(
            f"option liveness is {options.liveness:g}, but it is the process's, which was made "
            f"with {liveness:g}; leave it out for this group, or set it for the first one"
        )
    return replace(options, liveness=liveness)


WORLDS: Final = Worlds()
os.register_at_fork(after_in_child=WORLDS.__init__)  # type: ignore[misc]


def attachment(here: Where, options: Options, interface: Interface) -> Attachment:
    """A rank's attachment by an interface, with packets that it and the receive buffer carry."""
    mtu = options.mtu or min(interface.mtu, AUTO_MTU_MAX)
    if mtu > interface.mtu:
        log.warning(
            "%s: option mtu is %d, but that of %s is %d: larger packets are "
            "refused; lower LOSSYCOLL_MTU, or raise that of the interface",
            here,
            mtu,
            interface,
            interface.mtu,
        )
    buffer = receive_buffer(options.socket_buffer, interface.version)
    payload = fitting_payload(payload_bytes(mtu, interface.version), buffer, here.world)
    if packets_per_peer(payload, buffer, here.world) < 1:
        log.warning(
            "%s: the receive buffer of %d bytes can't hold one packet of each of the %d "
            "other ranks, so some will be lost; raise sysctl net.core.rmem_max, and "
            "LOSSYCOLL_SOCKET_BUFFER if that is set",
            here,
            buffer,
            here.world - 1,
        )
    return Attachment(interface, mtu, payload)


@dataclass(frozen=True)
class GroupSpec:
    """Specification of a group, seen from one of its ranks."""

    store: Store  # The group's, with keys of earlier groups maybe
    rank: int  # This process's
    size: int  # The group's ranks
    timeout: timedelta  # The group's
    name: str  # torch's name of the group
    global_ranks: tuple[int, ...]  # torch's global rank of each rank of the group
    parent: Parent | None = None  # A group that all of these ranks belong to, if there is one
    pg_options: object = None  # The user's, as Options.resolve takes them

    def defined(self, options: Options) -> Defined:
        return Defined(self.rank, self.global_ranks, options.shared())


class Contact(NamedTuple):
    """Addresses of a rank, and what it offers to others of its machine."""

    control: tuple[str, int]  # Where its plane listens
    link: tuple[str, int]  # Where its host is
    device: str  # The interface of these
    offer: Offer

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Contact:
        (address, port), (host, link) = said["control"], said["link"]
        control, device = (str(address), int(port)), str(said.get("device", ""))
        return cls(control, (str(host), int(link)), device, Offer.from_json(said["offer"]))


@dataclass(frozen=True)
class Ends:
    """A new world's sockets at this rank, which are open before the ranks meet."""

    plane: ControlPlane
    host: Host
    sharing: Sharing
    contact: Contact

    def to_json(self) -> dict[str, Any]:
        return self.contact._asdict() | {"offer": self.contact.offer.to_json()}

    def close(self) -> None:
        self.plane.close()
        self.host.close()
        self.sharing.close()


@dataclass
class GroupBuilder:
    """A group that is being made: each step of ``group_steps.py`` fills in what it has made.

    What is given at first is the rank's own; where ranks know one another, ``connected`` fills in
    what the others find out as they meet.
    """

    spec: GroupSpec  # The group that is wanted
    rendezvous: Rendezvous  # The place in the store where its ranks meet
    undo: contextlib.ExitStack  # Closes what the steps have opened, if a later one fails
    secret: Secret | None = None  # The job's; None: there is none, or it can't be used
    unusable: OptionError | None = None  # Why it can't
    # ---- prepare ----
    worlds: Sequence[World] = ()  # Where all its members have met before, held
    options: Options = field(init=False)  # This rank's
    network: Attachment = field(init=False)  # What it sends through
    interfaces: Sequence[Interface] = ()  # Those that it can send through, the one in use first
    ends: Ends | None = None  # What it has opened for a new world, where there may be one
    rdma: Rdma = field(default_factory=Rdma)  # Its port of RDMA, for the host of a new world
    # ---- meet, or connected ----
    session: str = ""  # The group's, of 16 hex digits, equal on all ranks
    definition: Defined = field(init=False)  # What this rank takes the group for
    number: int = 0  # The group's, which keys injected faults
    token: str = ""  # A new world's secret
    world: World | None = None  # Where all have met before; None: they make a new world
    shares: bool = False  # The group is made on the world's host, as none asks for another
    members: tuple[int, ...] = ()  # The group's ranks, as ranks of the world
    plane: ControlPlane = field(init=False)  # The world's
    contacts: Sequence[Contact] = ()  # Of each rank, where a host is new
    reach: Reach = field(default_factory=Reach)  # Who is reached by RDMA, in a new world
    # ---- member_of, open_engine, join ----
    membership: Membership = field(init=False)  # This rank's place in the group
    host: Host = field(init=False)  # The engine's host that the group is made on
    engine: EngineGroup = field(init=False)  # The group's engine
    addresses: Sequence[str] = ()  # Where each rank's host is
    topology: Topology = field(init=False)  # Who shares a machine and a site
    founded: World | None = None  # The world that begins with the group

    @property
    def here(self) -> Where:
        """This rank, as errors name it."""
        return Where(self.spec.rank, self.spec.size)

    @property
    def who(self) -> str:
        return str(self.here)
