"""A peer's averaging by gossip with a random partner (AD-PSGD), over TCP's send and recv.

Each peer asks a partner after its steps of a round, beside the next ones, and answers others
meanwhile. Both take half of the difference. A partner that doesn't answer is left for another.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer

from benchmarks.common import tcp

from .peer import keep
from .runs import PEERS, SPEEDS

PORT: Final = 7000
TIMEOUT: Final = 5.0
MEETS, COPIES = b"m", b"c"
"""What a peer asks for: to average, or the other's values alone."""


class Averaging:
    """A peer from when it answers others."""

    def __init__(self, config: Mapping[str, Any], model: nn.Module, inner: Optimizer) -> None:
        tcp.use_by_default(config["control"])
        self._model, self._inner, self._config = model, inner, config
        self._local = config["local"] * SPEEDS[config["peer"]]
        self._others = [one for i, one in enumerate(config["addresses"]) if i != config["peer"]]
        self._draw = random.Random(f"{config['peer']}, {config['life']}")
        self._disk = Path(config["folder"]) / f"checkpoint-{config['peer']}.pt"
        self._lock, self._steps, self._done = threading.Lock(), 0, ""
        self._asks = threading.Thread()
        self._listener = socket.create_server((config["addresses"][config["peer"]], PORT))
        threading.Thread(target=self._answer, daemon=True).start()

    @property
    def param_groups(self) -> Any:
        return self._inner.param_groups

    def begin(self) -> None:
        """A peer that comes back has its moments from its disk, and another's parameters."""
        if self._config["life"]:
            if self._disk.exists():
                self._inner.load_state_dict(torch.load(self._disk, weights_only=True))
            self._ask(COPIES)

    def _mine(self) -> torch.Tensor:
        with self._lock:
            return parameters_to_vector(self._model.parameters()).detach()

    def _take(self, change: torch.Tensor) -> None:
        with self._lock:
            now = parameters_to_vector(self._model.parameters()).detach()
            vector_to_parameters(now + change, self._model.parameters())

    def _receive(self, link: socket.socket) -> torch.Tensor:
        values = torch.empty(sum(p.numel() for p in self._model.parameters()))
        room = memoryview(values.numpy().view(np.uint8).data)
        while room:
            count = link.recv_into(room)
            if not count:
                raise ConnectionError("the partner has ended")
            room = room[count:]
        return values

    def _answer(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return  # this peer ends
            with contextlib.suppress(OSError), link:  # the other was preempted
                link.settimeout(TIMEOUT)
                if link.recv(1) == COPIES:
                    link.sendall(self._mine().numpy().tobytes())
                    continue
                theirs, mine = self._receive(link), self._mine()
                link.sendall(mine.numpy().tobytes())
                self._take((theirs - mine) / 2)

    def _ask(self, what: bytes) -> None:
        self._done = "no partner"
        for partner in self._draw.sample(self._others, PEERS - 1):
            with (
                contextlib.suppress(OSError),  # it isn't there: another may be
                socket.create_connection((partner, PORT), TIMEOUT) as link,
            ):
                mine = self._mine()
                link.sendall(what + (mine.numpy().tobytes() if what == MEETS else b""))
                theirs = self._receive(link)
                self._take((theirs - mine) / (2 if what == MEETS else 1))
                self._done = "met"
                return

    def step(self) -> dict[str, Any] | None:
        """A step, and what came of the latest partner."""
        with self._lock:
            self._inner.step()
        self._steps += 1
        done = "" if self._asks.is_alive() else self._done
        if self._steps % self._local == 0 and not self._asks.is_alive():
            keep(self._inner.state_dict(), self._disk)
            self._asks = threading.Thread(target=self._ask, args=(MEETS,), daemon=True)
            self._asks.start()
        if not done:
            return None
        self._done = ""
        return {"members": 1 + (done == "met"), "failure": "" if done == "met" else done}
