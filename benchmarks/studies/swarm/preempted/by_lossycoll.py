"""A peer's averaging by lossycoll.MoshpitSGD: rounds by the samples of all, beside the steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from lossycoll import LossyError, MoshpitAverager, MoshpitSGD, Swarm
from lossycoll.cli.main import main

from .runs import PEERS

PORT: Final = 7000
ROUND_SECONDS: Final = 60.0


def serve(config: Mapping[str, Any]) -> None:
    """The directory, as ``lossycoll directory`` has it."""
    main(["directory", "--new", f"{config['always']}:{PORT}"])


class Averaging:
    """A peer from when it has joined."""

    def __init__(self, config: Mapping[str, Any], model: nn.Module, inner: Optimizer) -> None:
        self._comes_back, self._batch = config["life"] > 0, config["batch"]
        swarm = Swarm(join=[f"{config['always']}:{PORT}"], name=str(config["peer"]))
        self._averager = MoshpitAverager(swarm, model.parameters(), wire=config["wire"])
        self._optimizer = MoshpitSGD(
            model,
            inner,
            self._averager,
            target_samples=config["target"],
            delayed=True,
            timeout=ROUND_SECONDS,
        )

    @property
    def param_groups(self) -> Any:
        return self._optimizer.param_groups

    def begin(self) -> None:
        """Waits for all, or takes the others' state."""
        if not self._comes_back:
            self._averager.wait_for(PEERS, timeout=ROUND_SECONDS)
            return
        while True:
            with contextlib.suppress(LossyError):  # a donor was preempted, too
                self._optimizer.catch_up(timeout=ROUND_SECONDS)
                return

    def step(self) -> dict[str, Any] | None:
        """A step, and what a round did if one has ended."""
        report = self._optimizer.step(weight=self._batch)
        if report is None:
            return None
        return {"members": len(report.members), "failure": report.failure}
