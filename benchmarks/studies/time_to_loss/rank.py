"""One host of the benchmark: ``python -m benchmarks.studies.time_to_loss.rank CONFIG OUT``.

Trains the demo's model, and notes the loss on held-out text over the seconds spent on training.
CONFIG is JSON: ``train`` (a TrainConfig), ``control`` (of TCP, "" for none), ``limit`` in seconds,
``device`` of the model, which hosts share.
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

from benchmarks.common import tcp
from benchmarks.common.tcp import connections
from lossycoll.cli.demo import corpus as demo_data
from lossycoll.cli.demo.model import ByteGPT, next_byte_loss
from lossycoll.cli.demo.worker import ADAMW, TrainConfig, Validation, init_group, learning_rate

CHECK_STEPS = 10


def main() -> None:
    given = json.loads(sys.argv[1])
    config = TrainConfig(**given["train"])
    torch.set_num_threads(1)
    before = connections()
    init_group(config)
    dist.barrier()  # by now all are connected
    if given["control"]:
        assert tcp.use(given["control"], before) >= dist.get_world_size() - 1
    out = Path(sys.argv[2]) if dist.get_rank() == 0 else None
    train(config, given["limit"], out, given["device"])
    gc.collect()  # DDP is part of a reference cycle, and holds the group
    dist.barrier()
    dist.destroy_process_group()


def train(config: TrainConfig, limit: float, out: Path | None, device: str = "cpu") -> None:
    """Writes the curve to ``out`` as it grows: (seconds, step, validation loss), the seconds of
    training alone, on the slowest rank. One rank has it, and judges. Ends after ``limit`` seconds.
    """
    rank = dist.get_rank()
    corpus = demo_data.load(config.seed)
    torch.manual_seed(config.seed)
    model = ByteGPT(config.layers, config.width, config.context).to(device)
    prepared = config.found().prepare(model, torch.optim.AdamW, ADAMW)
    replica, optimizer = prepared.forward, prepared.optimizer
    batches = torch.Generator().manual_seed(config.seed * 10_007 + rank + 1)
    validation = Validation(corpus.validation, config, device)

    curve: list[tuple[float, int, float]] = []
    spent = 0.0

    def note(step: int) -> None:
        if out is not None:
            curve.append((round(spent, 4), step, validation.loss(model)))
            out.write_text(json.dumps(curve))

    note(0)
    dist.barrier()
    started = time.perf_counter()
    for step in range(1, config.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, config.steps)
        step_of(replica, optimizer, corpus.train, config, batches, device)
        if step % CHECK_STEPS == 0 or step == config.steps:
            prepared.wait_parameters()
            dist.barrier()
            spent += time.perf_counter() - started
            note(step)
            if longest(spent) > limit:
                break
            started = time.perf_counter()


def step_of(
    replica: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    text: torch.Tensor,
    config: TrainConfig,
    batches: Any,
    device: str,
) -> None:
    inputs, targets = demo_data.draw(text, config.batch, config.context, batches)
    loss = next_byte_loss(replica(inputs.to(device)), targets.to(device))
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def longest(seconds: float) -> float:
    """Of all ranks, so that they agree; small, and so exact."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


if __name__ == "__main__":
    main()
