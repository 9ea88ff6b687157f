"""A rank's averaging by gloo: one job, which starts again from its checkpoint when a rank dies.

The job is told the speeds: each rank takes as many steps as it can between two all-reduces, so that
none waits for a slow one. Every round ends with a checkpoint on each rank's own disk.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

from benchmarks.common import tcp

from .peer import keep
from .runs import PEERS, SPEEDS

PORT: Final = 7000
TIMEOUT: Final = timedelta(seconds=60)
KEPT: Final = 2
"""Checkpoints: ranks may be a round apart when one dies."""


def serve(config: Mapping[str, Any]) -> None:
    """The rendezvous, which outlives the job."""
    _store = TCPStore(config["always"], PORT, is_master=True, wait_for_workers=False)
    while True:
        time.sleep(60)


class Averaging:
    """A rank from when all have met."""

    def __init__(self, config: Mapping[str, Any], model: nn.Module, inner: Optimizer) -> None:
        tcp.use_by_default(config["control"])
        self._model, self._inner = model, inner
        self._rank, self._folder = config["peer"], Path(config["folder"])
        self._local = config["local"] * SPEEDS[self._rank]
        store = TCPStore(config["always"], PORT, is_master=False, timeout=TIMEOUT)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(str(config["life"]), store),
            rank=self._rank,
            world_size=PEERS,
            timeout=TIMEOUT,
        )
        self._steps = self._rounds = 0

    @property
    def param_groups(self) -> Any:
        return self._inner.param_groups

    def _path(self, number: int) -> Path:
        return self._folder / f"checkpoint-{self._rank}-{number}.pt"

    def begin(self) -> None:
        """Loads the latest round of which every rank has a checkpoint."""
        names = self._folder.glob(f"checkpoint-{self._rank}-*.pt")
        latest = torch.tensor(max((int(path.stem.split("-")[-1]) for path in names), default=0))
        dist.all_reduce(latest, op=dist.ReduceOp.MIN)
        self._rounds = int(latest)
        if self._rounds:
            kept = torch.load(self._path(self._rounds), weights_only=True)
            self._model.load_state_dict(kept["model"])
            self._inner.load_state_dict(kept["inner"])

    def step(self) -> dict[str, Any] | None:
        """A step, and a round if one is due."""
        self._inner.step()
        self._steps += 1
        if self._steps % self._local:
            return None
        values = parameters_to_vector(self._model.parameters()).detach()
        values *= SPEEDS[self._rank] / sum(SPEEDS)
        dist.all_reduce(values)
        vector_to_parameters(values, self._model.parameters())
        self._rounds += 1
        state = {"model": self._model.state_dict(), "inner": self._inner.state_dict()}
        keep(state, self._path(self._rounds))
        self._path(self._rounds - KEPT).unlink(missing_ok=True)
        return {"members": PEERS, "failure": ""}
