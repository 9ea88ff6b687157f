"""Records that the steps of group construction hand on to one another."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from lossycoll.errors import OptionError
from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.engine.reports import LinkInfo
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
class GroupBuilder:
    """A group that is being made.

    Attributes:
        worlds: Where all its members have met before, held.
        secret: The job's; None: there is none, or it can't be used.
        unusable: Why it can't.
    """

    spec: GroupSpec
    rendezvous: Rendezvous
    undo: contextlib.ExitStack
    worlds: Sequence[World]
    secret: Secret | None = None
    unusable: OptionError | None = None

    @property
    def who(self) -> str:
        """This rank, as errors name it."""
        return f"rank {self.spec.rank}/{self.spec.size}"


@dataclass(frozen=True)
class PreparedRank:
    """Resources that this rank opens before the ranks meet.

    ``ends`` and ``rdma``: what a new world takes, where there may be one. ``interfaces``: those
    that it can send through, the one in use first.
    """

    options: Options
    network: Attachment
    ends: Ends | None
    rdma: Rdma | None = None
    interfaces: Sequence[Interface] = ()


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
        """Where they are, for the other ranks."""
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


@dataclass(frozen=True)
class Met:
    """Agreement of all ranks on a new group. ``world``: where they meet, None: in a new one.

    Attributes:
        session: This group's, of 16 hex digits, equal on all ranks.
        options: This rank's.
        network: What it sends through.
        definition: What this rank takes the group for.
        number: The group's, which keys injected faults.
        token: A new world's secret.
        world: Where all have met before; None: they make a new world.
        shares: The group is made on the world's host, as none asks for another.
        members: The group's ranks, as ranks of the world.
        plane: The world's.
        host: A new world's, to be started.
        sharing: What it offers to others of its machine.
        endpoints: Where the new world's planes listen.
        devices: The interfaces of these addresses.
        links: Where its hosts are.
        offers: What they offer.
        rdma: This rank's port of RDMA for the host.
        reach: Who is reached by it, in a new world.
    """

    session: str
    options: Options
    network: Attachment
    definition: Definition
    number: int
    token: str
    world: World | None
    shares: bool
    members: tuple[int, ...]
    plane: ControlPlane
    host: Host | None = None
    sharing: Sharing | None = None
    endpoints: tuple[tuple[str, int], ...] = ()
    devices: tuple[str, ...] = ()
    links: tuple[tuple[str, int], ...] = ()
    offers: tuple[Offer, ...] = ()
    rdma: Rdma | None = None
    reach: Reach | None = None

    @property
    def all_here(self) -> bool:
        """Whether no member is known to be lost or gone, this rank included."""
        return self.plane.is_sound and all(map(self.plane.is_here, self.members))


@dataclass(frozen=True)
class DataPath:
    """The engine's host and group, where each rank's is, and who shares a machine."""

    host: Host
    engine: EngineGroup
    link: LinkInfo
    addresses: Sequence[str]
    topology: Topology


@dataclass(frozen=True)
class Joined:
    """This rank's membership; ``founded``: the world that begins with it."""

    membership: Membership
    founded: World | None
