"""A user's program whose types a checker must know. It is never run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import assert_type

import lossycoll
from lossycoll import lab, plan, simulate


def observed() -> None:
    figures = lossycoll.stats()
    assert_type(figures.calls, int)
    assert_type(figures.loss_rate, float)
    assert_type(figures.peers, tuple[lossycoll.PeerStats, ...])
    assert_type(lossycoll.last_report(), "lossycoll.Report | None")
    assert_type(lossycoll.topology(), lossycoll.Topology)


def chosen() -> None:
    options = lossycoll.Options(repair=1, fec="auto", max_missing=0.01, wire="int8")
    assert_type(options, lossycoll.Options)
    dist.init_process_group(backend="lossy", pg_options=options)


def bounded(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    dist.init_process_group(backend="lossy")
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters())
    bound = lossycoll.DriftBound(replica, optimizer, period=8, max_missing=0.01)
    assert_type(bound, lossycoll.DriftBound)
    for inputs, wanted in data:
        loss = nn.functional.cross_entropy(replica(inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with lossycoll.reliable():
            dist.all_reduce(loss)
    drift = lossycoll.measure_drift(replica)
    assert_type(drift, lossycoll.Drift)


def compressed(model: nn.Module) -> lossycoll.ARCTopKState:
    replica = DistributedDataParallel(model)
    state = lossycoll.ARCTopKState(None, ratio=0.2, named_parameters=model.named_parameters())
    replica.register_comm_hook(state, lossycoll.arc_topk_hook)
    assert_type(state.iter, int)
    return state


def sharded(model: nn.Module) -> lossycoll.ShardedOptimizer:
    optimizer = lossycoll.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    backup = lossycoll.ShardBackup(optimizer, every=10)
    backup.step()
    assert_type(backup.steps, int)
    return optimizer


def late(model: nn.Module) -> lossycoll.DropCompute:
    return lossycoll.DropCompute(model, micro_batches=8, drop_rate=0.05)


def peer(model: nn.Module) -> None:
    with lossycoll.Swarm(join=["directory:29400"]) as swarm:
        averager = lossycoll.MoshpitAverager(swarm, model, (4, 4), wire="int8")
        assert_type(averager, lossycoll.MoshpitAverager)
        inner = torch.optim.AdamW(model.parameters())
        optimizer = lossycoll.MoshpitSGD(model, inner, averager, every=20, delayed=True)
        assert_type(optimizer.catch_up(), "lossycoll.CatchUpReport | None")
        assert_type(optimizer.step(weight=32.0), "lossycoll.RoundReport | None")
        assert_type(optimizer.samples, int)


def tolerant() -> Any:
    return lossycoll.torchft_process_group(timeout=10.0, options={"repair": 2})


def failed() -> str:
    try:
        dist.barrier()
    except lossycoll.PeerLostError as error:
        return str(error)
    except lossycoll.LossyError:
        return "another error of ours"
    return f"{lab.__name__} {plan.__name__} {simulate.__name__} {lossycoll.__version__}"
