"""Context of one group at one rank, made by the backend, and the ranks that operations are for."""

from __future__ import annotations

from dataclasses import dataclass

from lossycoll.errors import ClosedError
from lossycoll.options.fields import Options
from lossycoll.plan import Topology
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.world.group_state import Health
from lossycoll.runtime.world.membership import Membership


@dataclass(frozen=True, slots=True)
class GroupContext:
    """Context of one group at one rank."""

    health: Health  # Which calls were issued, and what has failed; the control plane's listener
    options: Options  # The group's
    number: int  # The group's number on the wire
    # The group on the engine; None in a world of one, where data is copied
    engine: EngineGroup | None
    control: Membership | None  # The group on the control plane; None in a world of one
    topology: Topology  # Which ranks share a host and a site; flat where nothing is shared

    def check_sound(self) -> None:
        """Returns if the group neither failed nor was destroyed."""
        if self.health.failure is not None:
            raise self.health.failure.again()
        if self.health.closed:
            raise ClosedError(f"{self.health.where}: the group was destroyed")


@dataclass(frozen=True, slots=True)
class Members:
    """Ranks that take part: ``ranks`` (ascending) of ``world``, ``rank`` among them."""

    world: int
    rank: int
    ranks: tuple[int, ...]

    @property
    def complete(self) -> bool:
        return len(self.ranks) == self.world

    @property
    def lost(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world) if rank not in self.ranks)
