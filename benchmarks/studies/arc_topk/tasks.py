"""What is trained: the demo's GPT on source text, and a convolutional network on digits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from benchmarks.studies.quality.tasks import Task, digits, gpt

GPT_STEPS, CONV_STEPS = 120, 80


def conv_net() -> nn.Module:
    """Three convolutions over 8 x 8 pixels, 64,000 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def conv(steps: int = CONV_STEPS) -> Task:
    """scikit-learn's digits, SGD with momentum."""
    return replace(digits(steps), model=conv_net, learning_rate=0.1)


def short_gpt(steps: int = GPT_STEPS) -> Task:
    return gpt(steps)


TASKS: Mapping[str, Callable[..., Task]] = {"gpt": short_gpt, "conv": conv}


def gradients(task: Task, steps: int, every: int, seed: int = 1) -> list[list[torch.Tensor]]:
    """Of all parameters of two or more dimensions, at every ``every``-th of ``steps`` steps."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters(), lr=task.learning_rate, **task.defaults)
    draw = torch.Generator().manual_seed(seed)
    out = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = task.rate(step)
        inputs, targets = task.draw(draw)
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if step % every == every - 1:
            out.append([_gradient(p) for p in model.parameters() if p.dim() >= 2])
        optimizer.step()
    return out


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()
