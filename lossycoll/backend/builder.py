"""A group that is being made: what was asked for, and what its steps have made of it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

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
from lossycoll.runtime.world.membership import Membership
from lossycoll.runtime.world.messages import Defined
from lossycoll.runtime.world.rendezvous import Rendezvous

from .rdma import Rdma, Reach
from .sharing import Offer, Sharing
from .worlds import Attachment, Parent, World


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
