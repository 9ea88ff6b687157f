"""What one rank of the demo does: training, measured.

Started by demo.py as ``python -m lossycoll.demo_train CONFIG``. Apart from the name of the backend,
nothing in the training loop knows that packets may be lost; the methods differ in how model and
optimizer are made.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from lossycoll import demo_data, demo_theory
from lossycoll.demo_model import ByteGPT, next_byte_loss
from lossycoll.launch import EventWriter

# Replicas drift with the square root of the steps times this, times the noise of one rank's
# gradient: a large batch and a modest rate keep them together.
LEARNING_RATE = 1.2e-3
VALIDATION_WINDOWS = 256
MEASUREMENTS = 8
# The first steps pay for DDP's bucket building and cold memory; they say nothing about the rest.
UNTIMED_STEPS = 3


@dataclass(frozen=True)
class TrainConfig:
    backend: str
    method: str
    """ddp, bounded (DDP with DriftBound) or sharded (ShardedOptimizer)."""
    loss: float
    steps: int
    seed: int
    layers: int
    width: int
    context: int
    batch: int
    events: str


class Validation:
    """The same windows of held-out text every time, for every run with this seed."""

    def __init__(self, text: Tensor, config: TrainConfig) -> None:
        generator = torch.Generator().manual_seed(config.seed)
        self._batches = [
            demo_data.draw(text, config.batch, config.context, generator)
            for _ in range(math.ceil(VALIDATION_WINDOWS / config.batch))
        ]

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        losses = [next_byte_loss(model(inputs), targets) for inputs, targets in self._batches]
        return float(torch.stack(losses).mean())


def learning_rate(step: int, steps: int) -> float:
    """A short linear warm-up, then half a cosine down to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return LEARNING_RATE * (step + 1) / warm_up
    share = (step - warm_up) / max(1, steps - warm_up)
    return LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def train(config: TrainConfig) -> dict[str, Any]:
    """Trains, and returns this rank's figures."""
    rank = dist.get_rank()
    corpus = demo_data.load(config.seed)
    torch.manual_seed(config.seed)
    model = ByteGPT(config.layers, config.width, config.context)
    replica, optimizer = set_up(config.method, model)
    theory = demo_theory.Trail(optimizer) if config.method == "sharded" else None
    batches = torch.Generator().manual_seed(config.seed * 10_007 + rank + 1)
    validation = Validation(corpus.validation, config)
    report = EventWriter(config.events) if rank == 0 else None
    measured_at = {round(config.steps * i / MEASUREMENTS) for i in range(1, MEASUREMENTS + 1)}

    train_losses: list[float] = []
    step_seconds: list[float] = []
    validation_curve = [(0, validation.loss(model))]
    drift_curve: list[tuple[int, dict[str, Any]]] = []
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        for parameter_group in optimizer.param_groups:
            parameter_group["lr"] = learning_rate(step - 1, config.steps)
        inputs, targets = demo_data.draw(corpus.train, config.batch, config.context, batches)
        loss = next_byte_loss(replica(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if theory is not None:
            theory.note()
        step_seconds.append(time.perf_counter() - started)
        train_losses.append(loss.item())
        if report is not None:
            report.write(kind="step", step=step, loss=train_losses[-1])
        if step in measured_at:
            # The replica itself, not DDP's wrapper: that one may start collectives of its own.
            validation_curve.append((step, validation.loss(model)))
            drift_curve.append((step, drift_of(model, theory, config.loss)))
    if report is not None:
        report.close()
    return {
        "train": train_losses,
        "validation": validation_curve,
        "drift": drift_curve,
        "step_seconds": step_seconds[UNTIMED_STEPS:] or step_seconds,
        "traffic": traffic(config.backend),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "corpus": {
            "train_files": corpus.train_files,
            "train_bytes": len(corpus.train),
            "validation_files": corpus.validation_files,
            "validation_bytes": len(corpus.validation),
        },
    }


def set_up(method: str, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What is run forward, and what is stepped."""
    how: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
    if method == "sharded":
        return model, lossycoll.ShardedOptimizer(model.parameters(), torch.optim.AdamW, **how)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters(), **how)
    if method == "bounded":
        lossycoll.DriftBound(replica, optimizer)
    return replica, optimizer


def drift_of(model: nn.Module, theory: demo_theory.Trail | None, loss: float) -> dict[str, Any]:
    """How far the replicas are apart, and where there is a formula, how far they should be."""
    drift = lossycoll.measure_drift(model)
    return {
        "mean_square_distance": drift.total,
        "relative_rms": drift.relative_rms,
        "expected": None if theory is None else theory.expected_drift(loss),
    }


def traffic(backend: str) -> dict[str, int] | None:
    """What this rank sent and missed. torch's other backends do not count."""
    if backend != "lossy":
        return None
    figures = lossycoll.stats()
    return {
        name: int(getattr(figures, name))
        for name in ("packets_sent", "packets_missing", "packets_injected", "bytes_sent")
    }


def main() -> None:
    path = Path(sys.argv[1])
    known = {field.name for field in fields(TrainConfig)}
    values = json.loads(path.read_text(encoding="utf-8"))
    config = TrainConfig(**{name: value for name, value in values.items() if name in known})
    torch.set_num_threads(1)
    dist.init_process_group(backend=config.backend)
    figures = train(config)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, figures)
    if dist.get_rank() == 0:
        (path.parent / "ranks.json").write_text(json.dumps(gathered), encoding="utf-8")
    # DDP's wrapper is part of a reference cycle. While it lives, so do gloo's threads, and one
    # that frees a tensor while the interpreter is going down aborts the process.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
