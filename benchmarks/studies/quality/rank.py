"""What one rank does: trains run after run, in a group of its own each, and reports them."""

from __future__ import annotations

import gc
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import lossycoll
from lossycoll.cli.demo.methods import Method

from .matrix import Run, batch_share, faults
from .tasks import TASKS, Task, cross_entropy, judge

TIMEOUT = timedelta(seconds=120)
CURVE_STEPS = 10
TRAFFIC = (
    *("packets_sent", "packets_injected", "packets_missing", "bytes_sent"),
    *("packets_resent", "resent_reliable", "parity_sent", "packets_recovered"),
)


def serve(rank: int, world: int, port: int, jobs: Connection) -> None:
    """Takes (number, run, its method, steps or None) until None comes; answers (result or None,
    error)."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    for number, run, method, steps in iter(jobs.recv, None):
        try:
            prefixed = PrefixStore(f"run{number}", store)
            jobs.send((_one(rank, run, method, steps, prefixed), ""))
        except Exception:
            jobs.send((None, traceback.format_exc()))
            return  # its group may have ended in any state


def _one(rank: int, run: Run, method: Method, steps: int | None, store: Store) -> dict[str, Any]:
    task = TASKS[run.task](*([] if steps is None else [steps]))
    options = lossycoll.Options(
        mtu=task.mtu, inject=faults(run), seed=run.seed, log="warning", **method.options
    )
    dist.init_process_group(
        "lossy",
        store=store,
        rank=rank,
        world_size=run.world,
        timeout=TIMEOUT,
        pg_options=options,
    )
    found = train(task, run, method)
    # DDP is part of a reference cycle, and while it lives so do the group's threads.
    gc.collect()
    dist.destroy_process_group()
    return found


def train(task: Task, run: Run, method: Method) -> dict[str, Any]:
    """Trains one model and measures it: the result of a run, the same on all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(run.seed)
    model = task.model()
    settings = {"lr": task.learning_rate, **task.defaults}
    prepared = method.prepare(model, task.optimizer, settings)
    batches = torch.Generator().manual_seed(run.seed * 10_007)
    losses = torch.zeros(task.steps)
    before = _traffic()
    started, used = time.monotonic(), time.process_time()
    for step in range(task.steps):
        for group in prepared.optimizer.param_groups:
            group["lr"] = task.rate(step)
        inputs, targets = (
            part[rank::world][: round(batch_share(run) * len(part) / world)]
            for part in task.draw(batches)
        )
        loss = cross_entropy(prepared.forward(inputs), targets)
        prepared.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        prepared.optimizer.step()
        losses[step] = loss.detach()
    prepared.wait_parameters()
    seconds, used = time.monotonic() - started, time.process_time() - used
    traffic = _traffic() - before
    with lossycoll.reliable():
        dist.all_reduce(losses, op=dist.ReduceOp.AVG)
        dist.all_reduce(traffic)
        drift = lossycoll.measure_drift(model)
        parts = losses.split(CURVE_STEPS)  # type: ignore[no-untyped-call]
        return {
            "models": _judged(task, model, rank, world),
            "drift": {"mean_square": drift.total, "relative": drift.relative_rms},
            "curve": [round(part.mean().item(), 4) for part in parts],
            "traffic": dict(zip(TRAFFIC, map(int, traffic.tolist()), strict=True)),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "steps": task.steps,
            "seconds": round(seconds, 3),
            "cpu_seconds": round(used, 3),
        }


def _traffic() -> Tensor:
    stats = lossycoll.stats()
    return torch.tensor([float(getattr(stats, name)) for name in TRAFFIC], dtype=torch.float64)


def _judged(task: Task, model: nn.Module, rank: int, world: int) -> dict[str, dict[str, float]]:
    """Loss and accuracy of rank 0's model, of the ranks' average, and of all ranks' on average."""
    vector = parameters_to_vector(model.parameters()).detach()
    average, first = vector.double(), vector.clone()
    dist.all_reduce(average)
    dist.broadcast(first, 0)
    # Each rank judges every model on its share of the examples.
    share = (task.held_out[0][rank::world], task.held_out[1][rank::world])
    sums = []
    for parameters in (first, (average / world).to(vector.dtype), vector):
        probe = task.model()
        vector_to_parameters(parameters, probe.parameters())
        sums.append(judge(probe, share))
    table = torch.stack(sums)
    dist.all_reduce(table)
    return {
        name: {"loss": (loss / count).item(), "accuracy": (right / count).item()}
        for name, (loss, right, count) in zip(("rank0", "average", "replicas"), table, strict=True)
    }
