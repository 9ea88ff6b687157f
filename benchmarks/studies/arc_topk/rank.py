"""One host of the benchmark: ``python -m benchmarks.studies.arc_topk.rank CONFIG OUT``.

CONFIG is JSON. ``what`` "steps": ``rounds`` steps of DDP in each of ``variants``, which take turns;
OUT gets when this rank began and ended. ``what`` "train": ``task`` is trained in each of
``variants``, one after another; OUT gets the loss on held-out data over steps, seconds and bytes.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common.lab_job import answer
from benchmarks.studies.lossy_links.rank import BATCH, CONTEXT, LAYERS, WIDTH
from benchmarks.studies.quality.tasks import cross_entropy, judge
from lossycoll.cli.demo.model import VOCABULARY, ByteGPT, next_byte_loss

from .tasks import TASKS
from .variants import VARIANTS, Groups, replica

UNTIMED = 3
"""Steps of each variant that come first: memory, buckets, the rate of the path."""
CHECKS = 8


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    groups = Groups.made()
    run = steps if config["what"] == "steps" else train
    found = run(config, groups)
    answer(found)
    gc.collect()  # DDP is part of a reference cycle, and holds the groups
    dist.barrier()
    dist.destroy_process_group()


def sent() -> int:
    """Bytes that this host has sent, headers and resends included."""
    total = 0
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, figures = line.partition(":")
        if name.strip() != "lo":
            total += int(figures.split()[8])
    return total


# ---- the time of a step ----


def steps(config: dict[str, Any], groups: Groups) -> dict[str, Any]:
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1))
    replicas = {
        name: replica(variant, ByteGPT(LAYERS, WIDTH, CONTEXT), groups.of(variant), 2)
        for name, variant in ((name, VARIANTS[name]) for name in config["variants"])
    }
    for ddp in replicas.values():
        for _ in range(UNTIMED):
            step(ddp, tokens)
    times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in replicas}
    volume: dict[str, list[int]] = {variant: [] for variant in replicas}
    for number in range(config["rounds"]):
        order = list(replicas) if number % 2 == 0 else list(replicas)[::-1]
        for variant in order:
            dist.barrier(group=groups.gloo)
            before, began = sent(), time.monotonic()
            step(replicas[variant], tokens)
            times[variant].append((began, time.monotonic()))
            dist.barrier(group=groups.gloo)
            volume[variant].append(sent() - before)
    return {"times": times, "bytes": volume}


def step(ddp: DistributedDataParallel, tokens: torch.Tensor) -> None:
    ddp.zero_grad()
    next_byte_loss(ddp(tokens[:, :-1]), tokens[:, 1:]).backward()  # type: ignore[no-untyped-call]


# ---- what is learned ----


def train(config: dict[str, Any], groups: Groups) -> dict[str, Any]:
    return {variant: learn(variant, config, groups) for variant in config["variants"]}


def learn(variant: str, config: dict[str, Any], groups: Groups) -> list[tuple[Any, ...]]:
    """(step, seconds, bytes sent, loss on held-out data, share of right answers) as it goes on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    task = TASKS[config["task"]]()
    torch.manual_seed(config["seed"])
    model = task.model()
    how = VARIANTS[variant]
    ddp = replica(how, model, groups.of(how), task.steps // 10)
    optimizer = task.optimizer(ddp.parameters(), lr=task.learning_rate, **task.defaults)
    draw = torch.Generator().manual_seed(config["seed"])
    curve: list[tuple[Any, ...]] = []
    seconds, volume = 0.0, 0

    def note(number: int) -> None:
        loss, right, count = judge(model, task.held_out).tolist() if rank == 0 else (0.0, 0.0, 1.0)
        curve.append((number, round(seconds, 4), volume, loss / count, right / count))

    note(0)
    dist.barrier(group=groups.gloo)
    before, began = sent(), time.perf_counter()
    for number in range(1, task.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = task.rate(number - 1)
        inputs, targets = (part.chunk(world)[rank] for part in task.draw(draw))
        optimizer.zero_grad()
        cross_entropy(ddp(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if number % max(1, task.steps // CHECKS) == 0 or number == task.steps:
            dist.barrier(group=groups.gloo)
            seconds += time.perf_counter() - began
            volume += sent() - before
            note(number)
            if longest(seconds, groups) > config["limit"]:
                break
            dist.barrier(group=groups.gloo)
            before, began = sent(), time.perf_counter()
    return curve


def longest(seconds: float, groups: Groups) -> float:
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.gloo)
    return float(most)


if __name__ == "__main__":
    main()
