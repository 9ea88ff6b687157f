"""Listeners of a group to its control plane."""

from __future__ import annotations

from collections.abc import Callable

from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.world.group_state import Health


class HealthListener:
    """Base listener, which tells a group's health."""

    def __init__(self, health: Health) -> None:
        self.on_dead = health.on_dead
        self.on_abort = health.on_abort
        self.on_broken = health.on_broken
        self.on_mismatch = health.on_mismatch
        self.on_differs = health.on_differs
        self.on_no_quorum = health.on_no_quorum
        self.call_at = health.call_at


class GroupListener(HealthListener):
    """Listener of a complete group: its health, and the endpoint's stats."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint.health)
        self._endpoint = endpoint
        self.on_own_host = endpoint.health.on_own_host
        self.stats = endpoint.stats.own
        self.on_round = endpoint.look
        self.on_views = endpoint.go_on

    def on_bye(self, rank: int, seq: int, why: str = "") -> None:
        self._endpoint.health.on_bye(rank, seq, why)
        self._endpoint.left(rank)  # it asks the health why its messages end

    def on_lost(self, rank: int, silent: float, ended: bool) -> int:
        self._endpoint.health.on_lost(rank, silent, ended)
        return self._endpoint.lose(rank)


class MeetingListener(GroupListener):
    """The same for a group whose ranks may not have met yet: then a rank that isn't heard is no
    loss, but one that can't be reached.
    """

    def __init__(self, endpoint: Endpoint, has_met: Callable[[], bool]) -> None:
        super().__init__(endpoint)
        self._has_met = has_met
        self.lost_early: dict[int, tuple[float, bool]] = {}
        """How long each such rank was silent, and whether its host refuses connections."""
        self.on_dead = self._on_dead

    def _on_dead(self, rank: int, silent: float, ended: bool) -> None:
        if self._has_met():
            self._endpoint.health.on_dead(rank, silent, ended)
        else:
            self.lost_early.setdefault(rank, (silent, ended))
