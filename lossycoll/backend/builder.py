"""A group that is being made: what was asked for, and what its steps have made of it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.net.interfaces import Interface
from lossycoll.runtime.world.control_plane import ControlPlane
from lossycoll.runtime.world.definition import Definition
from lossycoll.runtime.world.membership import Membership
from lossycoll.runtime.world.rendezvous import Rendezvous

from .rdma import Rdma, Reach
from .sharing import Offer, Sharing
from .worlds import Attachment, Parent, World


@dataclass(frozen=True)
class GroupSpec:
    """Specification of a group, seen from one of its ranks.

    Attributes:
        store: The group's, with keys of earlier groups maybe.
        rank: This process's.
        size: The group's ranks.
        timeout: The group's.
        name: torch's name of the group.
        global_ranks: torch's global rank of each rank of the group.
        parent: A group that all of these ranks belong to, if there is one.
    """

    store: Store
    rank: int
    size: int
    timeout: timedelta
    name: str
    global_ranks: tuple[int, ...]
    parent: Parent | None = None

    def defined(self, options: Options) -> Definition:
        """The group as this rank defines it."""
        return Definition(self.rank, self.global_ranks, options.shared())


@dataclass(frozen=True)
class Ends:
    """A new world's sockets at this rank, which are open before the ranks meet."""

    plane: ControlPlane
    host: Host
    control: tuple[str, int]
    link: tuple[str, int]
    sharing: Sharing
    device: str

    def to_json(self) -> dict[str, Any]:
        """Places and offer, for the other ranks."""
        return {
            "control": self.control,
            "link": self.link,
            "device": self.device,
            "offer": self.sharing.offer.to_json(),
        }

    def close(self) -> None:
        """They won't be used."""
        self.plane.close()
        self.host.close()
        self.sharing.close()


@dataclass
class GroupBuilder:
    """A group that is being made: each step of ``group_steps.py`` fills in what it has made.

    What is given at first is the rank's own; where ranks know one another, ``connected`` fills in
    what the others find out as they meet.

    Attributes:
        spec: The group that is wanted.
        rendezvous: The place in the store where its ranks meet.
        undo: Closes what the steps have opened, if a later one fails.
        secret: The job's; None: there is none, or it can't be used.
        unusable: Why it can't.
        worlds: Where all its members have met before, held.
        options: This rank's.
        network: What it sends through.
        interfaces: Those that it can send through, the one in use first.
        ends: What it has opened for a new world, where there may be one.
        rdma: Its port of RDMA, for the host of a new world.
        session: The group's, of 16 hex digits, equal on all ranks.
        definition: What this rank takes the group for.
        number: The group's, which keys injected faults.
        token: A new world's secret.
        world: Where all have met before; None: they make a new world.
        shares: The group is made on the world's host, as none asks for another.
        members: The group's ranks, as ranks of the world.
        plane: The world's.
        endpoints: Where the new world's planes listen.
        devices: The interfaces of these addresses.
        links: Where its hosts are.
        offers: What they offer to others of their machines.
        reach: Who is reached by RDMA, in a new world.
        membership: This rank's place in the group.
        host: The engine's host that the group is made on.
        engine: The group's engine.
        addresses: Where each rank's host is.
        topology: Who shares a machine and a site.
        founded: The world that begins with the group.
    """

    spec: GroupSpec
    rendezvous: Rendezvous
    undo: contextlib.ExitStack
    secret: Secret | None = None
    unusable: OptionError | None = None
    # ---- prepare ----
    worlds: Sequence[World] = ()
    options: Options = field(init=False)
    network: Attachment = field(init=False)
    interfaces: Sequence[Interface] = ()
    ends: Ends | None = None
    rdma: Rdma | None = None
    # ---- meet, or connected ----
    session: str = ""
    definition: Definition = field(init=False)
    number: int = 0
    token: str = ""
    world: World | None = None
    shares: bool = False
    members: tuple[int, ...] = ()
    plane: ControlPlane = field(init=False)
    endpoints: tuple[tuple[str, int], ...] = ()
    devices: tuple[str, ...] = ()
    links: tuple[tuple[str, int], ...] = ()
    offers: tuple[Offer, ...] = ()
    reach: Reach | None = None
    # ---- become_member, open_engine, join ----
    membership: Membership = field(init=False)
    host: Host = field(init=False)
    engine: EngineGroup = field(init=False)
    addresses: Sequence[str] = ()
    topology: Topology = field(init=False)
    founded: World | None = None

    @property
    def here(self) -> Where:
        """This rank, as errors name it."""
        return Where(self.spec.rank, self.spec.size)

    @property
    def who(self) -> str:
        """The same as text."""
        return str(self.here)

    @property
    def all_here(self) -> bool:
        """True if no member is known to be lost or gone, this rank included."""
        return self.plane.is_sound and all(map(self.plane.is_here, self.members))

    @property
    def place(self) -> tuple[str, int]:
        """The address and the port at which this rank's plane listens."""
        return self.plane.place_of(self.members[self.spec.rank])
