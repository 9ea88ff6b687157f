"""Wait of a rank for the control plane of a new world, and the cause where it fails.

The ranks have met in the store by now. So a rank that can't be reached can still say there that it
lives, and what has become of its own attempts: that tells a blocked port from a process that ended.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from lossycoll.errors import LossyError, RendezvousError
from lossycoll.runtime.world.control_plane import ControlPlane
from lossycoll.runtime.world.group_state import Health
from lossycoll.runtime.world.probe import answers
from lossycoll.runtime.world.reachability import (
    Side,
    heartbeat_of,
    said_trouble,
    translated,
    unreached,
)

from .builder import GroupBuilder, Met

SLICE_SECONDS: Final = 0.5
"""How often a rank that waits says that it lives, and looks what the others say."""
SIGN_SHARE: Final = 0.3
"""Of the liveness time: how long a rank that can't be reached has for a sign of life."""
PROBE_SECONDS: Final = 3.0
"""How long a rank whose address seems to be translated has to answer."""
COORDINATOR: Final = 0


class Meeting:
    """One rank's wait.

    ``lost_early``: the ranks that the plane gave up before all had met: seconds of silence, and
    whether connections are refused.
    """

    def __init__(
        self,
        builder: GroupBuilder,
        met: Met,
        plane: ControlPlane,
        health: Health,
        lost_early: Mapping[int, tuple[float, bool]],
    ) -> None:
        self._builder = builder
        self._met = met
        self._plane = plane
        self._health = health
        self._lost_early = lost_early
        self._rank = builder.spec.rank
        self._heartbeat = 0

    def wait(self) -> None:
        """Returns when all have met."""
        seconds = self._builder.spec.timeout.total_seconds()
        end = time.monotonic() + seconds
        while not self._plane.meet(min(SLICE_SECONDS, seconds)):
            # Whoever has followed another rank 0 doesn't come; that is the reason, also of a loss.
            self._builder.rendezvous.check_followed()
            if self._plane.has_met_or_failed or time.monotonic() > end:
                raise self._why()
            self._say_alive()
            if (parted := self._builder.rendezvous.parted()) is not None:
                raise parted
        if self._rank == COORDINATOR:
            self._check_translated()

    def _say_alive(self) -> None:
        self._heartbeat += 1
        trouble = self._plane.trouble_with(COORDINATOR) if self._rank != COORDINATOR else ""
        self._builder.rendezvous.tell("alive", {"heartbeat": self._heartbeat, "trouble": trouble})

    def _why(self) -> LossyError:
        """The reason why the ranks haven't met."""
        if self._health.failure is not None:
            return self._health.failure
        if not self._lost_early and COORDINATOR in self._plane.protocol.welcomed:
            text = "rank 0 hasn't heard all other ranks within the group's timeout"
            return RendezvousError(f"{self._builder.who}: {text}", peer=COORDINATOR)
        peer = min(self._lost_early, default=self._plane.missing()[0])
        silent, ended = self._lost_early.get(peer, (self._plane.liveness, False))
        # The connection that isn't there is one with the coordinator.
        far = self._rank if peer == COORDINATOR else peer
        other = COORDINATOR if far == self._rank else far
        found = self._sign_of(other)
        if isinstance(found, LossyError):
            return found
        if found is None and peer != self._rank:
            self._health.on_dead(peer, silent, ended)
            assert self._health.failure is not None
            return self._health.failure
        ports = self._met.options.port_range
        return unreached(self._builder.who, self._far(far, found), self._coordinator(far), ports)

    def _sign_of(self, rank: int) -> Any:
        """What ``rank`` says in the store from now on, or the error by which another one has ended
        the rendezvous; None: nothing."""
        rendezvous = self._builder.rendezvous
        before = heartbeat_of(rendezvous.told("alive", rank))
        seconds = max(3 * SLICE_SECONDS, SIGN_SHARE * self._plane.liveness)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._say_alive()
            if (parted := rendezvous.parted()) is not None:
                return parted
            told = rendezvous.told("alive", rank)
            if heartbeat_of(told) > before:
                return told
            time.sleep(SLICE_SECONDS / 5)
        return None

    def _far(self, rank: int, told: Any) -> Side:
        own = rank == self._rank
        return self._side(
            rank, self._plane.trouble_with(COORDINATOR) if own else said_trouble(told)
        )

    def _coordinator(self, far: int) -> Side:
        return self._side(
            COORDINATOR, self._plane.trouble_with(far) if self._rank == COORDINATOR else ""
        )

    def _side(self, rank: int, trouble: str = "") -> Side:
        return Side(rank, *self._met.endpoints[rank], self._met.devices[rank], trouble)

    def _check_translated(self) -> None:
        """Raises RendezvousError where a rank's connection comes from an address that isn't its
        own, and its own can't be reached."""
        spec, secret = self._builder.spec, self._builder.secret
        for rank, source in sorted(self._plane.sources().items()):
            address, port = self._plane.place_of(rank)
            if not answers(address, port, rank, self._met.token, spec.size, PROBE_SECONDS, secret):
                side = self._side(rank)
                raise translated(self._builder.who, side, source, self._side(COORDINATOR))
