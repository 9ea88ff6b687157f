"""Wait of a rank for the control plane of a new world, and the cause where it fails.

The ranks have met in the store by now. So a rank that can't be reached can still say there that it
lives, and what has become of its own attempts: that tells a blocked port from a process that ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from lossycoll.errors import LossyError, RendezvousError
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.world.comparison import (
    Side,
    heartbeat_of,
    said_trouble,
    translated,
    unreached,
)
from lossycoll.runtime.world.group_state import Health
from lossycoll.runtime.world.queries import answers

from .builder import GroupBuilder


class GroupListener:
    """Listener of a group: its health, and the endpoint's stats.

    ``has_met``: whether all ranks have met by now; one that isn't heard before can't be reached.
    """

    def __init__(self, endpoint: Endpoint, has_met: Callable[[], bool] = lambda: True) -> None:
        self._endpoint = endpoint
        self._has_met = has_met
        self.lost_early: dict[int, tuple[float, bool]] = {}
        """Seconds of silence of each such rank, and whether its host refuses connections."""
        health = endpoint.health
        self.on_abort = health.on_abort
        self.on_broken = health.on_broken
        self.on_mismatch = health.on_mismatch
        self.on_differs = health.on_differs
        self.on_no_quorum = health.on_no_quorum
        self.call_at = health.call_at
        self.on_own_host = health.on_own_host
        self.stats = endpoint.stats.own
        self.on_round = endpoint.look
        self.on_views = endpoint.go_on

    def on_dead(self, rank: int, silent: float, ended: bool) -> None:
        if self._has_met():
            self._endpoint.health.on_dead(rank, silent, ended)
        else:
            self.lost_early.setdefault(rank, (silent, ended))

    def on_bye(self, rank: int, seq: int, why: str = "") -> None:
        self._endpoint.health.on_bye(rank, seq, why)
        self._endpoint.left(rank)  # it asks the health why its messages end

    def on_lost(self, rank: int, silent: float, ended: bool) -> int:
        self._endpoint.health.on_lost(rank, silent, ended)
        return self._endpoint.lose(rank)


SLICE_SECONDS: Final = 0.5
"""Period at which a waiting rank says that it lives, and reads what the others say."""
SIGN_SHARE: Final = 0.3
"""Share of the liveness time that an unreachable rank has for a sign of life."""
PROBE_SECONDS: Final = 3.0
"""Time to answer for a rank whose address seems to be translated."""
COORDINATOR: Final = 0


class Meeting:
    """One rank's wait. ``lost_early``: the listener's."""

    def __init__(
        self, builder: GroupBuilder, health: Health, lost_early: Mapping[int, tuple[float, bool]]
    ) -> None:
        self._builder = builder
        self._plane = builder.plane
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
            over = self._plane.has_met_or_failed or time.monotonic() > end
            # The last rank may have come just after meet() gave up.
            if over and not self._plane.has_met:
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
        peer = min(self._lost_early or self._plane.missing() or [COORDINATOR])
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
        ports = self._builder.options.port_range
        hears = self._plane.trouble_with
        trouble = hears(COORDINATOR) if far == self._rank else said_trouble(found)
        here = hears(far) if self._rank == COORDINATOR else ""
        sides = self._side(far, trouble), self._side(COORDINATOR, here)
        return unreached(self._builder.who, *sides, ports)

    def _sign_of(self, rank: int) -> Any:
        """The next words of ``rank`` in the store; an error: another rank's; None: nothing."""
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

    def _side(self, rank: int, trouble: str = "") -> Side:
        contact = self._builder.contacts[rank]
        return Side(rank, *contact.control, contact.device, trouble)

    def _check_translated(self) -> None:
        """Raises RendezvousError where a rank's connection comes from an address that isn't its
        own, and its own can't be reached."""
        spec, secret = self._builder.spec, self._builder.secret
        for rank, source in sorted(self._plane.sources().items()):
            address, port = self._plane.place_of(rank)
            if not answers(
                address, port, rank, self._builder.token, spec.size, PROBE_SECONDS, secret
            ):
                side = self._side(rank)
                raise translated(self._builder.who, side, source, self._side(COORDINATOR))
