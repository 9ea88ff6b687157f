"""A peer's averaging by lossycoll.MoshpitSGD."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from lossycoll import MoshpitAverager, MoshpitSGD, Swarm

PORT: Final = 7000
LISTENING: Final = 2
"""So many peers have a directory: the second stands by."""
LINGER_SECONDS: Final = 120.0


class Averaging:
    """A peer of a swarm from when it has joined. ``steps``: those that it has had."""

    def __init__(
        self, config: Mapping[str, Any], model: nn.Module, inner: Optimizer, join: Sequence[str]
    ) -> None:
        self._first = config["peer"] == 0
        own = f"{config['address']}:{PORT}"
        self._swarm = Swarm(
            listen=own if config["peer"] < LISTENING else "",
            join=list(join),
            name=str(config["peer"]),
            secret=config["secret"],
        )
        self.places = [own]
        averager = MoshpitAverager(self._swarm, model.parameters(), wire=config["wire"])
        self._optimizer = MoshpitSGD(model, inner, averager, every=config["every"])
        self.steps = 0

    def __enter__(self) -> Averaging:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        until = time.monotonic() + LINGER_SECONDS
        # The first peer's directory is the others'.
        while error is None and self._first and time.monotonic() < until:
            if len(self._swarm.peers()) == 1:
                break
            time.sleep(0.05)
        self._swarm.close()

    def catch_up(self) -> dict[str, Any]:
        """Takes the others' state; how that went."""
        report = self._optimizer.catch_up(timeout=120.0)
        if report is None:
            raise SystemExit("nobody had a state for the newcomer")
        self.steps = self._optimizer.state_dict()["steps"]
        return asdict(report)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self) -> dict[str, Any] | None:
        """A step, and what a round did if one was due."""
        report = self._optimizer.step()
        self.steps += 1
        if report is None:
            return None
        return {
            "round": report.round,
            "members": len(report.members),
            "contributions": report.contributions,
            "kept": report.kept,
            "waited": report.waited,
            "seconds": report.seconds,
            "failure": report.failure,
        }
