"""The arms: what a training script does against loss, from nothing to all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from lossycoll import OptionError, Options

from .matrix import BASE, CONTROL, DISPERSED, UNREPAIRED


@dataclass
class Prepared:
    """What the training loop needs. ``parts`` only have to live as long as it does."""

    forward: nn.Module
    optimizer: torch.optim.Optimizer
    parts: tuple[Any, ...] = ()


Prepare = Callable[[nn.Module, Callable[..., torch.optim.Optimizer], dict[str, Any]], Prepared]


def _ddp(model: nn.Module, optimizer: Callable[..., Any], settings: dict[str, Any]) -> Prepared:
    return Prepared(DistributedDataParallel(model), optimizer(model.parameters(), **settings))


def _drift_bound(period: int = 16, dispersed: bool = False) -> Prepare:
    def prepare(
        model: nn.Module, optimizer: Callable[..., Any], settings: dict[str, Any]
    ) -> Prepared:
        out = _ddp(model, optimizer, settings)
        if dispersed:
            out.forward.register_comm_hook(None, lossycoll.dispersing_hook)
        bound = lossycoll.DriftBound(out.forward, out.optimizer, period)
        return Prepared(out.forward, out.optimizer, (bound,))

    return prepare


def _sharded(**how: Any) -> Prepare:
    def prepare(
        model: nn.Module, optimizer: Callable[..., Any], settings: dict[str, Any]
    ) -> Prepared:
        sharded = lossycoll.ShardedOptimizer(model.parameters(), optimizer, **how, **settings)
        return Prepared(model, sharded)

    return prepare


@dataclass(frozen=True)
class Arm:
    """``options`` of the group, ``needs`` what lossycoll must have."""

    prepare: Prepare
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""


ARMS: Mapping[str, Arm] = {
    BASE: Arm(_ddp, {"delivery": "reliable"}),
    # What is lost counts as zero, in the sum of the gradients and in what is handed back.
    "zero-fill": Arm(_ddp, {"estimator": "zero_fill", "on_missing": "zero"}),
    # Zero in the sum; where a sum doesn't come back, the rank's own gradient over N (which DDP has
    # put into the bucket) stays. The published code of OptiReduce (arXiv 2310.06993) does this.
    "own-gradient": Arm(_ddp, {"estimator": "zero_fill", "on_missing": "keep"}),
    "ddp": Arm(_ddp),
    CONTROL: Arm(_ddp, {"delivery": "reliable"}),
    UNREPAIRED: Arm(_drift_bound(), {"repair": 0}, needs="DriftBound"),
    "ddp+driftbound": Arm(_drift_bound(), needs="DriftBound"),
    "sharded": Arm(_sharded(), needs="ShardedOptimizer"),
    # What was tried to improve the two methods.
    "sharded/published": Arm(_sharded(repair=0, max_age=None)),
    "sharded/repair0": Arm(_sharded(repair=0, max_age=3)),
    "sharded/repair0/age1": Arm(_sharded(repair=0, max_age=1)),
    "sharded/repair0/age0": Arm(_sharded(repair=0, max_age=0)),
    "sharded/feedback": Arm(_sharded(error_feedback=True, max_age=3)),
    "sharded/repair1": Arm(_sharded(repair=1, max_age=3)),
    "sharded/age0": Arm(_sharded(max_age=0)),
    "sharded/age3": Arm(_sharded(max_age=3)),
    "ddp+driftbound/repair0/period4": Arm(_drift_bound(period=4), {"repair": 0}),
    DISPERSED[0]: Arm(_drift_bound(dispersed=True), {"repair": 0}),
    DISPERSED[1]: Arm(_drift_bound(dispersed=True)),
    "ddp+driftbound/repair1": Arm(_drift_bound(), {"repair": 1}),
}


def missing(name: str) -> str:
    """Why this version of lossycoll can't run an arm; empty if it can."""
    arm = ARMS[name]
    if arm.needs and not hasattr(lossycoll, arm.needs):
        return f"lossycoll has no {arm.needs}"
    try:
        Options(**arm.options)
    except OptionError as error:
        return str(error)
    return ""
