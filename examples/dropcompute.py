"""A rank that is late computes less: DropCompute in the loop of gradient accumulation.

torchrun --nproc-per-node 3 examples/dropcompute.py

In each step another rank is slow. It stops after a few of its micro-batches, the others go on with
the mean over those that were completed, and nobody waits for the rest.
"""

import time

import common
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import lossycoll

STEPS = 60
MICRO_BATCHES = 8
SLOW_SECONDS = 0.02
THRESHOLD = 3.5 * SLOW_SECONDS


def example() -> str:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(common.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    task = common.Task(seed=rank)
    batches = iter(lambda: task.batch(rows=16), None)
    drop = lossycoll.DropCompute(model, MICRO_BATCHES, THRESHOLD)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for inputs, targets in drop(batches):
            if step % world == rank:
                time.sleep(SLOW_SECONDS)
            loss = mse_loss(model(inputs), targets)
            (loss / drop.micro_batches).backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / drop.report().last.completed)
    reports = drop.gather_report()
    # A busy machine drops more, so a single step's loss says little.
    reached = sum(losses[-10:]) / 10
    assert reached < 0.5 * losses[0], losses
    for report in reports:
        # Of 8 micro-batches in a slow step the fifth can't begin any more.
        assert report.dropped >= 4 * (STEPS // world), report
        assert report.saved > 0
    rate, saved = reports[0].drop_rate, sum(report.saved for report in reports)
    return (
        f"loss {losses[0]:.3f} -> {reached:.3f}, {rate:.0%} of the micro-batches dropped, "
        f"{saved:.1f} s of compute saved, {common.dropped()}"
    )


if __name__ == "__main__":
    common.run(example)
