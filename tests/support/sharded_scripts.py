"""Scripts that train with ShardedOptimizer on several ranks, and with a plain one beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import lossycoll
from tests.support import harness
from tests.support.harness import run_good
from tests.support.sharded_cases import batch, loss_of, share

STEPS = 4
ENV = {"LOSSYCOLL_LOG": "warning", "LOSSYCOLL_LIVENESS": "30"}


def step_both(
    mine: Any,
    theirs: Any,
    model: nn.Module,
    plain: nn.Module,
    data: Any,
    rank: int,
    loss: Callable[[Any, Any], Tensor] = loss_of,
    each: Callable[[Any, nn.Module], None] | None = None,
) -> None:
    """A step of ``model`` with this rank's share of ``data``, and one of ``plain`` with all of it;
    ``each``: called between backward and step with either optimizer."""
    for optimizer, network_, own in ((mine, model, share(data, rank)), (theirs, plain, data)):
        optimizer.zero_grad()
        loss(network_, own).backward()
        if each:
            each(optimizer, network_)
        optimizer.step()


def train(
    mine: Any, theirs: Any, model: nn.Module, plain: nn.Module, rank: int, world: int, **rest: Any
) -> None:
    """STEPS steps of both, ``each`` as in step_both and ``after`` called with either optimizer."""
    each, after = rest.get("each"), rest.get("after")
    for step in range(rest.get("first", 0), rest.get("first", 0) + STEPS):
        step_both(mine, theirs, model, plain, batch(step, world), rank, each=each)
        if after:
            after(mine)
            after(theirs)


def run_script(rank: int, world: int) -> int:
    """Runs the script that the environment names; returns the packets that were lost."""
    module, _, name = os.environ["SCRIPT"].partition(":")
    __import__(module)
    harness.init()
    getattr(sys.modules[module], name)(rank, world)
    dropped = lossycoll.stats().packets_missing
    dist.destroy_process_group()
    return dropped


def train_as_one_process(script: Callable[[int, int], None]) -> None:
    """Runs a function of (rank, world) on 3 ranks. It compares; here it's made sure that nothing
    got lost meanwhile."""
    env = {**ENV, "SCRIPT": f"{script.__module__}:{script.__name__}"}
    assert run_good(run_script, 3, env, timeout=200) == [0, 0, 0]
