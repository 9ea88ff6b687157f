"""What is trained for long: the GPT of the short trainings, and a convolutional network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.studies.quality.tasks import CONTEXT, Pair, Task, gpt, python_source, split_digits
from lossycoll.cli.demo import corpus as demo_data

STEPS = 2000
GPT_WINDOWS = 32
BATCH = 64
HELD_OUT = 2000
HEIGHT, WIDTH = 8, 12
SHIFT = 4
"""Columns by which the second digit lies to the right of the first one, of eight."""
NOISE = 0.3
"""Standard deviation of what is added to pixels of 0 to 1. Without it 2,000 steps leave nothing to
learn, whatever is sent."""


def long_gpt(steps: int = STEPS) -> Task:
    """As in the short trainings, with a quarter of their windows a step."""

    def draw(generator: torch.Generator) -> Pair:
        return demo_data.draw(python_source().train, GPT_WINDOWS, CONTEXT, generator)

    return replace(gpt(steps), draw=draw)


def conv_net() -> nn.Module:
    """77,000 parameters. Its sizes are such that PowerSGD has ranks of ARC-Top-K's bytes."""
    return nn.Sequential(
        nn.Unflatten(1, (1, HEIGHT)),
        nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(),
        nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(48, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (HEIGHT // 4) * (WIDTH // 4), 80), nn.ReLU(),
        nn.Linear(80, 100),
    )  # fmt: skip


def two_digits(digits: Pair, count: int, generator: torch.Generator) -> Pair:
    """Pictures of two digits, one over the other's edge, in noise, and which two they are."""
    pixels, labels = digits
    first, second = torch.randint(len(labels), (2, count), generator=generator)
    pictures = NOISE * torch.randn(count, HEIGHT, WIDTH, generator=generator)
    clean = torch.zeros_like(pictures)
    clean[:, :, :8] = _square(pixels[first])
    clean[:, :, SHIFT:] = torch.maximum(clean[:, :, SHIFT:], _square(pixels[second]))
    return pictures + clean, 10 * labels[first] + labels[second]


def _square(pixels: Tensor) -> Tensor:
    return pixels.view(-1, 8, 8)


def long_conv(steps: int = STEPS) -> Task:
    """Two of scikit-learn's digits at once, 100 classes, SGD with momentum. No picture is seen
    twice, and those that are held out are of other digits."""
    trained, unseen = split_digits()
    return Task(
        model=conv_net,
        draw=partial(two_digits, trained, BATCH),
        held_out=two_digits(unseen, HELD_OUT, torch.Generator().manual_seed(7)),
        optimizer=torch.optim.SGD,
        defaults={"momentum": 0.9, "weight_decay": 5e-4},
        learning_rate=0.1,
        steps=steps,
    )


LONG_TASKS: Mapping[str, Callable[[int], Task]] = {"gpt": long_gpt, "conv": long_conv}
