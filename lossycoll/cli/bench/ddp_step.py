"""Steps of training, measured: the demo's model under DDP, by each backend in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lossycoll.cli.demo.model import VOCABULARY, ByteGPT, next_byte_loss

from .interleave import in_turns

LAYERS, WIDTH, CONTEXT, BATCH = 2, 128, 64, 4
"""Of the model (0.43 million parameters) and of what a rank draws for a step."""


def measure(groups: Mapping[str, dist.ProcessGroup], seconds: float) -> dict[str, list[float]]:
    """Seconds of every step, by backend: forward, backward with DDP's all-reduces, optimizer."""
    random = torch.Generator().manual_seed(dist.get_rank())
    text = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=random)
    replicas, optimizers = {}, {}
    for name, group in groups.items():
        torch.manual_seed(1)
        model = ByteGPT(LAYERS, WIDTH, CONTEXT)
        replicas[name] = DistributedDataParallel(model, process_group=group)
        optimizers[name] = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(name: str) -> float:
        dist.barrier()
        started = time.perf_counter()
        loss = next_byte_loss(replicas[name](text[:, :-1]), text[:, 1:])
        optimizers[name].zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizers[name].step()
        return time.perf_counter() - started

    taken = in_turns(tuple(groups), step, seconds)
    replicas.clear()
    gc.collect()  # DDP is part of a reference cycle, and holds its group
    return taken
