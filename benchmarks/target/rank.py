"""One host of the benchmark: ``python -m benchmarks.target.rank CONFIG OUT``.

Trains the demo's model, and notes the loss on held-out text over the seconds spent on training.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lossycoll import demo_data
from lossycoll.demo_model import ByteGPT, next_byte_loss
from lossycoll.demo_train import TrainConfig, Validation, learning_rate, set_up

CHECK_STEPS = 10


def main() -> None:
    config = TrainConfig(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group(config.backend)
    curve = train(config)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(curve))
    gc.collect()  # DDP is part of a reference cycle, and holds the group
    dist.barrier()
    dist.destroy_process_group()


def train(config: TrainConfig) -> list[tuple[float, int, float]]:
    """(seconds, step, validation loss): the seconds are of training alone, on the slowest rank."""
    rank = dist.get_rank()
    corpus = demo_data.load(config.seed)
    torch.manual_seed(config.seed)
    model = ByteGPT(config.layers, config.width, config.context)
    replica, optimizer = set_up(config.method, model)
    batches = torch.Generator().manual_seed(config.seed * 10_007 + rank + 1)
    validation = Validation(corpus.validation, config)
    curve = [(0.0, 0, validation.loss(model))]
    spent = 0.0
    dist.barrier()
    started = time.perf_counter()
    for step in range(1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, config.steps)
        inputs, targets = demo_data.draw(corpus.train, config.batch, config.context, batches)
        loss = next_byte_loss(replica(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % CHECK_STEPS == 0 or step == config.steps:
            dist.barrier()
            spent += time.perf_counter() - started
            curve.append((spent, step, validation.loss(model)))
            dist.barrier()
            started = time.perf_counter()
    return curve


if __name__ == "__main__":
    main()
