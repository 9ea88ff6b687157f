"""A peer's averaging by hivemind's Optimizer: rounds by the samples of all, beside the steps.

hivemind is no dependency: this is imported by the interpreter that ``--hivemind`` names.
"""

from __future__ import annotations

import importlib
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from benchmarks.common import tcp

hivemind: Any = importlib.import_module("hivemind")
"""Loaded before peers are forked."""

MATCHMAKING_SECONDS: Final = 3.0
"""What its documentation has for small runs in one place; its default is 15."""
REQUEST_SECONDS: Final = 1.0
CHUNK_SECONDS: Final = 5.0
ROUND_SECONDS: Final = 20.0
REFRESH: Final = {
    "min_refresh_period": 0.5,
    "default_refresh_period": 1.0,
    "max_refresh_period": 2.0,
}
"""How often peers look at how far the others are, as rounds take seconds here."""
PLACES: Final = "places"
POLL_SECONDS: Final = 0.05


def _table(config: Mapping[str, Any], address: str, places: list[str]) -> Any:
    tcp.use_by_default(config["control"])  # its connections are another process's
    return hivemind.DHT(
        initial_peers=places,
        host_maddrs=[f"/ip4/{address}/tcp/0"],
        start=True,
        use_relay=False,
        nat_port_map=False,
        auto_nat=False,
    )


def serve(config: Mapping[str, Any]) -> None:
    """A peer of the distributed hash table that stays."""
    table = _table(config, config["always"], [])
    path = Path(config["folder"]) / PLACES
    part = path.with_suffix(".part")
    part.write_text("\n".join(map(str, table.get_visible_maddrs())))
    part.rename(path)
    while True:
        time.sleep(60)


class Ended(logging.Handler):
    """How the latest round has ended: its members, 0 where it failed. hivemind logs it alone."""

    members = 0

    def emit(self, record: logging.LogRecord) -> None:
        """A line of the averager."""
        text = record.getMessage()
        if found := re.fullmatch(r"Averaged parameters with (\d+) peers", text):
            self.members = int(found[1])
        elif text.startswith("Averaging failed"):
            self.members = 0


class Averaging:
    """A peer from when it has joined."""

    def __init__(self, config: Mapping[str, Any], model: nn.Module, inner: Optimizer) -> None:
        del model  # the optimizer has its parameters
        self._comes_back = config["life"] > 0
        path = Path(config["folder"]) / PLACES
        while not path.exists():
            time.sleep(POLL_SECONDS)
        places = path.read_text().split()
        self._optimizer = hivemind.Optimizer(
            dht=_table(config, config["addresses"][config["peer"]], places),
            run_id="study",
            optimizer=inner,
            batch_size_per_step=config["batch"],
            target_batch_size=config["target"],
            use_local_updates=True,
            delay_state_averaging=True,
            matchmaking_time=MATCHMAKING_SECONDS,
            averaging_timeout=ROUND_SECONDS,
            next_chunk_timeout=CHUNK_SECONDS,
            load_state_timeout=ROUND_SECONDS,
            averager_opts={"request_timeout": REQUEST_SECONDS},
            tracker_opts=REFRESH,
            verbose=True,
        )
        self._ended = Ended()
        logging.getLogger("hivemind.optim.state_averager").addHandler(self._ended)
        self._averages = False

    @property
    def param_groups(self) -> Any:
        return self._optimizer.param_groups

    def begin(self) -> None:
        """A peer that comes back takes another's state."""
        if self._comes_back:
            self._optimizer.load_state_from_peers()

    def step(self) -> dict[str, Any] | None:
        """A step, and how a round has ended that was taken in. One that is on is waited for: with
        local updates hivemind 1.1.12 takes no step beside it."""
        self._optimizer.step()
        pending = self._optimizer.state_averager.pending_updates
        before, self._averages = self._averages, bool(pending)
        if self._averages or not before:
            return None
        members = self._ended.members
        return {"members": members or 1, "failure": "" if members else "it failed"}
