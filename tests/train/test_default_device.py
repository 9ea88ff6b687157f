"""Methods of training under torch.set_default_device(): models are where they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from tests.support.dropcompute_cases import dropping
from tests.support.harness import init, run_good
from tests.support.sharded_cases import batch, loss_of, network, replicas, sharded, share

STEPS = 3
ENV = {"LOSSYCOLL_LOG": "off", "LOSSYCOLL_DELIVERY": "reliable"}
SGD = torch.optim.SGD

Step = Callable[[int], None]


def stepped(model: nn.Module, optimizer: Any, data: list[Any]) -> Step:
    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, data[number]).backward()
        optimizer.step()

    return step


def shards(model: nn.Module, data: list[Any], **rest: Any) -> Step:
    optimizer = sharded(model.parameters(), SGD, lr=0.1, momentum=0.9, **rest)
    return stepped(model, optimizer, data)


def drops(model: nn.Module, data: list[Any]) -> Step:
    drop, optimizer = dropping(model, 2), SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        for each in drop([data[number], data[number]]):
            loss_of(model, each).backward()
        optimizer.step()

    return step


def bounds(model: nn.Module, data: list[Any]) -> Step:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    lossycoll.DriftBound(model, optimizer, period=2, state=True)
    return stepped(model, optimizer, data)


def hooked(state: Any, hook: Any) -> Callable[[nn.Module, list[Any]], Step]:
    def make(model: nn.Module, data: list[Any]) -> Step:
        with torch.device("cpu"):  # what torch itself makes
            ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state(), hook)
        return stepped(ddp, SGD(model.parameters(), lr=0.1), data)

    return make


def arc(method: str = "arc") -> lossycoll.ARCTopKState:
    return lossycoll.ARCTopKState(start_iter=1, dense_below=100, ratio=0.5, method=method)


METHODS: dict[str, Callable[[nn.Module, list[Any]], Step]] = {
    "ShardedOptimizer": shards,
    "with encodings": lambda *given: shards(*given, wire="int8"),
    "with feedback": lambda *given: shards(*given, error_feedback=True),
    "compressed": lambda *given: shards(*given, compression=arc()),
    "DriftBound": bounds,
    "DropCompute": drops,
    "ARC-Top-K": hooked(arc, lossycoll.arc_topk_hook),
    "random rows": hooked(lambda: arc("randk"), lossycoll.arc_topk_hook),
    "wire feedback": hooked(lossycoll.WireFeedbackState, lossycoll.wire_feedback_hook),
    "dispersing": hooked(lambda: None, lossycoll.dispersing_hook),
}


def rank_trains(rank: int, world: int) -> list[str]:
    """The methods with which the default device changes what is learnt, or that fail."""
    init()
    data = [share(batch(step, world), rank) for step in range(STEPS)]
    different = []
    for name, make in METHODS.items():
        learnt = []
        for around in (nullcontext(), torch.device("meta")):
            model = network()
            with around:
                step = make(model, data)
                for number in range(STEPS):
                    step(number)
            learnt.append(replicas(model))
        if not torch.equal(*learnt) or torch.equal(learnt[0][0], replicas(network())[0]):
            different.append(name)
    dist.destroy_process_group()
    return different


def test_another_default_device_changes_nothing_that_is_learnt() -> None:
    assert run_good(rank_trains, 2, ENV) == [[], []]


def rank_saves(rank: int, world: int) -> bool:
    """Whether a checkpoint of shards is the same, and loads, under another default device."""
    init()
    data = [share(batch(step, world), rank) for step in range(STEPS)]
    found = []
    for around in (nullcontext(), torch.device("meta")):
        model = network()
        with around:
            optimizer = sharded(model.parameters(), SGD, lr=0.1, momentum=0.9)
            stepped(model, optimizer, data)(0)
            books = []
            for to in range(world):
                optimizer.consolidate_state_dict(to)
                if to == rank:
                    books.append(optimizer.state_dict())
            optimizer.load_state_dict(books[0])
            backup = lossycoll.ShardBackup(optimizer)
            backup.step()
            restored = optimizer.restore_shards(backup)
            stepped(model, optimizer, data)(1)
        kept = [state["momentum_buffer"].sum().item() for state in books[0]["state"].values()]
        found.append((restored, kept, replicas(model)))
    dist.destroy_process_group()
    return found[0][:2] == found[1][:2] and torch.equal(found[0][2], found[1][2])


def test_shards_are_saved_and_restored_under_another_default_device() -> None:
    assert run_good(rank_saves, 2, ENV) == [True, True]
