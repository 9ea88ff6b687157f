"""One rank: ``python -m benchmarks.studies.arc_topk.long.rank CONFIG``, a file of JSON.

It names ``task``, ``seed``, ``steps`` and ``variants``, which are trained one after another. Rank 0
reports each: the loss on what is trained, and on what isn't, and the bytes that a step sends.
"""

from __future__ import annotations

import gc
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from benchmarks.studies.quality.tasks import Task, cross_entropy, judge
from lossycoll.cli.launcher import EventWriter

from ..variants import Variant, replica
from .tasks import LONG_TASKS
from .variants import INT8, LONG_VARIANTS, START

MTU = 1500
EVERY = 50
"""Steps of which the mean loss is a point of the curve."""
TIMEOUT = timedelta(seconds=300)
LIVENESS = 60.0
"""Seconds; ranks share cores with whatever else the machine does."""


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    # Within a host nothing would be encoded, hence UDP.
    dist.init_process_group("lossy", timeout=TIMEOUT, pg_options=options("same"))
    encoded = dist.new_group(backend="lossy", timeout=TIMEOUT, pg_options=options(INT8))
    task = LONG_TASKS[config["task"]](config["steps"])
    events = EventWriter(config["events"]) if dist.get_rank() == 0 else None
    for name in config["variants"]:
        variant = LONG_VARIANTS[name]
        found = learn(task, variant, encoded if variant.wire == INT8 else None, config["seed"])
        if events is not None:
            events.write(variant=name, **found)
        gc.collect()  # DDP is part of a reference cycle, and holds the group
        dist.barrier()
    if events is not None:
        events.close()
    dist.destroy_process_group()


def options(wire: str) -> lossycoll.Options:
    """Nothing may be lost: it would depend on what else the machine does."""
    return lossycoll.Options(
        delivery="reliable",
        link="udp",
        mtu=MTU,
        wire=wire,
        lossy_min_bytes=0,
        liveness=LIVENESS,
        log="warning",
    )


def learn(
    task: Task, variant: Variant, group: dist.ProcessGroup | None, seed: int
) -> dict[str, Any]:
    """One training. Bytes are means over ranks, of a step while all is sent whole and after."""
    torch.manual_seed(seed)
    model = task.model()
    start = task.steps // START
    ddp = replica(variant, model, group, start)
    marks = [traffic(group)]
    losses = train(task, ddp, seed, start, marks, group)
    means = torch.stack(marks).diff(dim=0)
    dist.all_reduce(means, op=dist.ReduceOp.AVG)
    dist.all_reduce(losses, op=dist.ReduceOp.AVG)
    loss, right, count = judge(model, task.held_out).tolist()
    parts = losses.split(EVERY)  # type: ignore[no-untyped-call]
    return {
        "losses": [round(part.mean().item(), 5) for part in parts],
        "held_out": {"loss": loss / count, "accuracy": right / count},
        "bytes": {
            "whole": means[0, 0].item() / start,
            "compressed": means[1, 0].item() / (task.steps - start),
        },
        "resent": means[:, 1].sum().item(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": task.steps,
        "start": start,
    }


def train(
    task: Task,
    ddp: DistributedDataParallel,
    seed: int,
    start: int,
    marks: list[Tensor],
    group: dist.ProcessGroup | None,
) -> Tensor:
    """This rank's loss at each step; ``marks`` grows by the traffic at ``start`` and at the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = task.optimizer(ddp.parameters(), lr=task.learning_rate, **task.defaults)
    draw = torch.Generator().manual_seed(seed)
    losses = torch.zeros(task.steps)
    for step in range(task.steps):
        if step == start:
            marks.append(traffic(group))
        for part in optimizer.param_groups:
            part["lr"] = task.rate(step)
        inputs, targets = (part.chunk(world)[rank] for part in task.draw(draw))
        optimizer.zero_grad()
        loss = cross_entropy(ddp(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses[step] = loss.detach()
    marks.append(traffic(group))
    return losses


def traffic(group: dist.ProcessGroup | None) -> Tensor:
    """This rank's bytes so far, headers and what was sent again included; packets sent again."""
    stats = lossycoll.stats(group)
    return torch.tensor([stats.bytes_sent, stats.packets_resent], dtype=torch.float64)


if __name__ == "__main__":
    main()
