"""A peer's averaging by hivemind's DecentralizedAverager, with the same local steps and rounds.

hivemind is no dependency: this is imported by the interpreter that ``--hivemind`` names.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.common import tcp

from .runs import PEERS

MATCHMAKING_SECONDS: Final = 5.0
REQUEST_SECONDS: Final = 3.0
CHUNK_SECONDS: Final = 10.0
ROUND_SECONDS: Final = 60.0
MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""Of AdamW, beside its count of steps."""


class Averaging:
    """A peer from when it has joined. ``steps``: those that it has had.

    A group of all is looked for beside the local steps, as hivemind's own optimizer does, so that
    a round needn't wait for it.
    """

    def __init__(
        self, config: Mapping[str, Any], model: nn.Module, inner: Optimizer, join: Sequence[str]
    ) -> None:
        tcp.use_by_default(config["control"])  # its connections are another process's
        self._inner, self._every = inner, config["every"]
        self._parameters = list(model.parameters())
        self.steps = self._rounds = 0
        self._control: Any = None
        self._asked = 0.0
        hivemind = importlib.import_module("hivemind")
        self._dht = hivemind.DHT(
            initial_peers=list(join),
            host_maddrs=[f"/ip4/{config['address']}/tcp/0"],
            start=True,
            use_relay=False,
            nat_port_map=False,
            auto_nat=False,
        )
        self.places = [str(place) for place in self._dht.get_visible_maddrs()]
        base = importlib.import_module("hivemind.averaging").DecentralizedAverager
        state = {"get_current_state": lambda _: self._state()}
        self._averager = type("Averager", (base,), state)(
            [p.detach().clone() for p in self._parameters],
            self._dht,
            start=True,
            prefix="study",
            target_group_size=PEERS,
            min_group_size=2,
            min_matchmaking_time=MATCHMAKING_SECONDS,
            request_timeout=REQUEST_SECONDS,
            next_chunk_timeout=CHUNK_SECONDS,
            allreduce_timeout=ROUND_SECONDS,
            declare_state_period=5.0,
        )

    def __enter__(self) -> Averaging:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._averager.shutdown()
        self._dht.shutdown()

    def _moments(self) -> Iterator[Tensor]:
        for parameter in self._parameters:
            of = self._inner.state.get(parameter, {})
            for name in MOMENTS:
                yield of.get(name, torch.zeros_like(parameter))

    def _state(self) -> tuple[dict[str, int], list[Tensor], None]:
        """What a newcomer gets: parameters and moments, between two steps or nearly so."""
        tensors = [p.detach().clone() for p in self._parameters]
        return {"steps": self.steps}, [*tensors, *(m.clone() for m in self._moments())], None

    def catch_up(self) -> dict[str, Any]:
        """Takes another peer's state; how that went."""
        begin = time.monotonic()
        taken = None
        tries = 0
        while taken is None and time.monotonic() - begin < ROUND_SECONDS:
            tries += 1
            taken = self._averager.load_state_from_peers(timeout=ROUND_SECONDS)
            if taken is not None and not taken[0]["steps"]:
                taken = None
        if taken is None:
            raise SystemExit("nobody had a state for the newcomer")
        metadata, tensors = taken
        count = len(self._parameters)
        moments = iter(tensors[count:])
        with torch.no_grad():
            for parameter, value in zip(self._parameters, tensors[:count], strict=True):
                parameter.copy_(value)
                self._inner.state[parameter] = {
                    "step": torch.tensor(float(metadata["steps"])),
                    **{name: next(moments).clone() for name in MOMENTS},
                }
        self.steps = metadata["steps"]
        return {
            "tries": tries,
            "donors": 1,
            "bytes": sum(tensor.nbytes for tensor in tensors),
            "seconds": time.monotonic() - begin,
        }

    def zero_grad(self) -> None:
        self._inner.zero_grad()

    def step(self) -> dict[str, Any] | None:
        """A step, and what a round did if one was due."""
        if self._control is None:
            self._look()
        self._inner.step()
        self.steps += 1
        if self.steps % self._every:
            return None
        return self._round()

    def _look(self) -> None:
        self._control = self._averager.step(
            scheduled_time=_now() + MATCHMAKING_SECONDS,
            timeout=ROUND_SECONDS,
            wait=False,
            require_trigger=True,
        )

    def _round(self) -> dict[str, Any]:
        begin = time.monotonic()
        with self._averager.get_tensors() as tensors, torch.no_grad():
            for tensor, parameter in zip(tensors, self._parameters, strict=True):
                tensor.copy_(parameter)
        control, self._control = self._control, None
        self._rounds += 1
        members, failure = 1, ""
        try:
            control.allow_allreduce()
            members = len(control.result(timeout=ROUND_SECONDS))
        except Exception as error:  # of several kinds; training goes on from what this peer has
            failure = f"{type(error).__name__}: {error}"
        if not failure:
            with self._averager.get_tensors() as tensors, torch.no_grad():
                for tensor, parameter in zip(tensors, self._parameters, strict=True):
                    parameter.copy_(tensor)
        return {
            "round": self._rounds,
            "members": members,
            "contributions": None,  # TCP loses none of a member
            "kept": float(bool(failure)),
            "waited": 0.0,
            "seconds": time.monotonic() - begin,
            "failure": failure,
        }


def _now() -> float:
    """By the clock that all of hivemind's peers keep."""
    return float(importlib.import_module("hivemind.utils").get_dht_time())
