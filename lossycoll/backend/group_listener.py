"""Where the control plane's word on a group goes."""

from __future__ import annotations

from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.membership.group_state import Health


class HealthListener:
    """What every group's health is told, whatever else listens."""

    def __init__(self, health: Health) -> None:
        self.on_dead = health.on_dead
        self.on_abort = health.on_abort
        self.on_broken = health.on_broken
        self.on_mismatch = health.on_mismatch
        self.on_differs = health.on_differs
        self.on_apart = health.on_apart
        self.call_at = health.call_at


class GroupListener(HealthListener):
    """What the control plane talks to: the health, and the endpoint's figures."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint.health)
        self._endpoint = endpoint
        self.on_own_host = endpoint.health.on_own_host
        self.figures = endpoint.figures.own
        self.on_beat = endpoint.look
        self.on_views = endpoint.go_on

    def on_bye(self, rank: int, seq: int, why: str = "") -> None:
        self._endpoint.health.on_bye(rank, seq, why)
        self._endpoint.left(rank)  # it asks the health why its messages end

    def on_lost(self, rank: int, silent: float, ended: bool) -> int:
        self._endpoint.health.on_lost(rank, silent, ended)
        return self._endpoint.lose(rank)
