"""What one rank of the demo does: plain DDP training, measured.

Started by demo.py as ``python -m lossycoll.demo_train CONFIG``. Apart from the name of
the backend, nothing in the training loop knows that packets may be lost.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from lossycoll import demo_data
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
    steps: int
    seed: int
    layers: int
    width: int
    context: int
    batch: int
    events: str


@dataclass
class Drift:
    """How far the replicas are apart."""

    mean_square_distance: float
    """Squared L2 distance of the parameters, averaged over all pairs of ranks."""
    relative_rms: float
    """Its root, over the L2 norm of the average parameters."""


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
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(replica.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    batches = torch.Generator().manual_seed(config.seed * 10_007 + rank + 1)
    validation = Validation(corpus.validation, config)
    report = EventWriter(config.events) if rank == 0 else None
    measured_at = {round(config.steps * i / MEASUREMENTS) for i in range(1, MEASUREMENTS + 1)}

    train_losses: list[float] = []
    step_seconds: list[float] = []
    validation_curve = [(0, validation.loss(model))]
    drift_curve: list[tuple[int, Drift]] = []
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        for parameter_group in optimizer.param_groups:
            parameter_group["lr"] = learning_rate(step - 1, config.steps)
        inputs, targets = demo_data.draw(corpus.train, config.batch, config.context, batches)
        loss = next_byte_loss(replica(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        step_seconds.append(time.perf_counter() - started)
        train_losses.append(loss.item())
        if report is not None:
            report.write(kind="step", step=step, loss=train_losses[-1])
        if step in measured_at:
            # The replica itself, not DDP's wrapper: that one may start collectives of its own.
            validation_curve.append((step, validation.loss(model)))
            drift_curve.append((step, measure_drift(model)))
    if report is not None:
        report.close()
    return {
        "train": train_losses,
        "validation": validation_curve,
        "drift": [(step, asdict(drift)) for step, drift in drift_curve],
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


@torch.no_grad()
def measure_drift(model: nn.Module) -> Drift:
    """The distance between replicas, exactly: nothing of this may be lost on the way.

    The mean over pairs of ||x_i - x_j||^2 is 2 / (N - 1) times the sum of the squared
    distances to the average. In double precision the average of equal floats is that
    float, so replicas that are equal give zero and not rounding noise.
    """
    world = dist.get_world_size()
    own = nn.utils.parameters_to_vector(model.parameters()).double()
    average = own.clone()
    with lossycoll.reliable():
        dist.all_reduce(average)
        average /= world
        squares = (own - average).square().sum()
        dist.all_reduce(squares)
    mean_square = 2 * squares.item() / max(1, world - 1)
    return Drift(mean_square, math.sqrt(mean_square) / average.norm().item())


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
