"""One rank of the demo: training, measured.

Started as ``python -m lossycoll.cli.demo.worker CONFIG``. Apart from the name of the backend,
nothing in the training loop knows that packets may be lost; the methods differ in how model and
optimizer are prepared (:mod:`.methods`).
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lossycoll
from lossycoll.cli.launcher import RESULT, EventWriter

from . import methods
from .corpus import draw, load
from .model import ByteGPT, next_byte_loss

# Replicas drift with the square root of the steps times this, times the noise of one rank's
# gradient: a large batch and a modest rate keep them together.
LEARNING_RATE = 1.2e-3
VALIDATION_WINDOWS = 256
MEASUREMENTS = 8
ADAMW: Final[Mapping[str, Any]] = {"betas": (0.9, 0.95), "weight_decay": 0.1}
DRIFT_EVERY, DRIFT_EVERY_EARLY = 3, 9
"""Steps between measurements of the drift, in the second half, over which its mean is taken, and in
the first. No divisors of DriftBound's period or of the turn in which ShardedOptimizer probes links:
all parts of them are looked at. Where nothing is lost it is measured with the validation only."""
# The first steps pay for DDP's bucket building and cold memory; they say nothing about the rest.
UNTIMED_STEPS = 3


@dataclass(frozen=True)
class TrainConfig:
    """Task of a rank. ``method``: the name of a :class:`Method` that ``module`` registers."""

    backend: str
    method: str
    module: str
    loss: float
    steps: int
    seed: int
    layers: int
    width: int
    context: int
    batch: int
    events: str

    def found(self) -> methods.Method:
        """The method; its module is imported."""
        return methods.find(self.method, self.module)


COUNTED: Final = ("packets_sent", "packets_missing", "packets_injected", "bytes_sent")


def traffic(config: TrainConfig) -> Counter[str]:
    """Packets that this rank has sent and missed; torch's other backends don't count."""
    if config.backend != "lossy":
        return Counter()
    figures = lossycoll.stats()
    return Counter({name: int(getattr(figures, name)) for name in COUNTED})


class Validation:
    """The same windows of held-out text every time, for every run with this seed."""

    def __init__(self, text: Tensor, config: TrainConfig, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(config.seed)
        batches = [
            draw(text, config.batch, config.context, generator)
            for _ in range(math.ceil(VALIDATION_WINDOWS / config.batch))
        ]
        self._batches = [(x.to(device), y.to(device)) for x, y in batches]

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Mean over the windows, in nats per byte."""
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
    rank = dist.get_rank()
    corpus = load(config.seed)
    torch.manual_seed(config.seed)
    model = ByteGPT(config.layers, config.width, config.context)
    prepared = config.found().prepare(model, torch.optim.AdamW, ADAMW, config.loss)
    replica, optimizer = prepared.forward, prepared.optimizer
    batches = torch.Generator().manual_seed(config.seed * 10_007 + rank + 1)
    validation = Validation(corpus.validation, config)
    report = EventWriter(config.events if rank == 0 else os.devnull)
    validated_at = {round(config.steps * i / MEASUREMENTS) for i in range(1, MEASUREMENTS + 1)}
    compared_at = compared_steps(config.steps) if config.loss else validated_at
    aside: Counter[str] = Counter()  # traffic of the measurements

    train_losses: list[float] = []
    step_seconds: list[float] = []
    validation_curve = [(0, validation.loss(model))]
    drift_curve: list[tuple[int, dict[str, Any]]] = []
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        for parameter_group in optimizer.param_groups:
            parameter_group["lr"] = learning_rate(step - 1, config.steps)
        inputs, targets = draw(corpus.train, config.batch, config.context, batches)
        loss = next_byte_loss(replica(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step in compared_at or step in validated_at:
            prepared.wait_parameters()  # here, where the step counts it
        step_seconds.append(time.perf_counter() - started)
        train_losses.append(loss.item())
        report.write(done=step, note=f"loss {train_losses[-1]:.3f}")
        # Of the replica itself, not DDP's wrapper: that one may start collectives of its own.
        if step in validated_at:
            if rank == 0 or step == config.steps:
                validation_curve.append((step, validation.loss(model)))
            dist.barrier()  # so that others wait here, and not within the next step
        if step in compared_at:
            before = traffic(config)
            drift_curve.append((step, drift_of(model, prepared.theory, config.loss)))
            aside += traffic(config) - before
    report.close()
    counted = traffic(config)
    counted.subtract(aside)
    return {
        "train": train_losses,
        "validation": validation_curve,
        "drift": drift_curve,
        "step_seconds": step_seconds[UNTIMED_STEPS:] or step_seconds,
        "traffic": counted or None,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "corpus": {
            "train_files": corpus.train_files,
            "train_bytes": len(corpus.train),
            "validation_files": corpus.validation_files,
            "validation_bytes": len(corpus.validation),
        },
    }


def compared_steps(steps: int) -> set[int]:
    """After which the drift is measured."""
    early = range(DRIFT_EVERY_EARLY, steps // 2 + 1, DRIFT_EVERY_EARLY)
    late = range(steps, steps // 2, -DRIFT_EVERY)
    return {*early, *late}


def drift_of(model: nn.Module, theory: methods.Theory | None, loss: float) -> dict[str, Any]:
    """Distance of the replicas, and the one they should have: None where nothing bounds it."""
    drift = lossycoll.measure_drift(model)
    expected = None if loss else 0.0
    return {
        "mean_square_distance": drift.total,
        "relative_rms": drift.relative_rms,
        "expected": expected if theory is None else theory.expected_drift(),
    }


def init_group(config: TrainConfig) -> None:
    """Starts the group, with the options that the method asks for; other backends have none."""
    options = dict(config.found().options) if config.backend == "lossy" else None
    dist.init_process_group(backend=config.backend, pg_options=options)


def main() -> None:
    """Trains as the configuration says; rank 0 writes all ranks' figures beside it."""
    path = Path(sys.argv[1])
    config = TrainConfig(**json.loads(path.read_text(encoding="utf-8")))
    torch.set_num_threads(1)
    init_group(config)
    figures = train(config)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, figures)
    if dist.get_rank() == 0:
        (path.parent / RESULT).write_text(json.dumps(gathered), encoding="utf-8")
    # DDP's wrapper is part of a reference cycle. While it lives, so do gloo's threads, and one
    # that frees a tensor while the interpreter is going down aborts the process.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
