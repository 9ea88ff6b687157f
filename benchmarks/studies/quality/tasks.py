"""What is trained: GPTs and an LSTM on source text, a classifier of handwritten digits.

Every rank draws the same batches and takes its share of each, so that runs of one seed see the same
data in the same order whatever the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lossycoll.cli.demo import corpus as demo_data
from lossycoll.cli.demo.model import VOCABULARY, ByteGPT

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """``draw`` gives a batch for all ranks together; ``held_out`` is what models are judged on;
    ``mtu`` is that of its groups, bytes."""

    model: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Pair]
    held_out: Pair
    optimizer: Callable[..., torch.optim.Optimizer]
    defaults: Mapping[str, Any]
    learning_rate: float
    steps: int
    mtu: int = 1500

    def rate(self, step: int) -> float:
        """The learning rate of a step, 0 first: a linear warm-up, then half a cosine down to 1%."""
        warm_up = max(1, self.steps // 10)
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        share = (step - warm_up) / max(1, self.steps - warm_up)
        return self.learning_rate * (0.01 + 0.495 * (1 + math.cos(math.pi * share)))


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """In nats per byte or per digit. Logits (..., classes), targets (...)."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


@torch.no_grad()
def judge(model: nn.Module, examples: Pair, batch: int = 64) -> Tensor:
    """(sum of the losses, number of right answers, number of answers), float64."""
    sums = torch.zeros(3, dtype=torch.float64)
    parts = (part.split(batch) for part in examples)  # type: ignore[no-untyped-call]
    for inputs, targets in zip(*parts, strict=True):
        logits = model(inputs)
        right = (logits.argmax(-1) == targets).sum()
        loss = cross_entropy(logits, targets, "sum")
        sums += torch.stack([loss.double(), right.double(), torch.tensor(float(targets.numel()))])
    return sums


CONTEXT = 32
WINDOWS = 128
HELD_OUT_WINDOWS = 1024


@lru_cache(maxsize=1)
def python_source() -> demo_data.Corpus:
    return demo_data.load(seed=7)


def gpt(steps: int = 240) -> Task:
    """Next bytes of the standard library's source. 68,000 parameters, AdamW."""
    corpus = python_source()
    held_out = demo_data.draw(
        corpus.validation, HELD_OUT_WINDOWS, CONTEXT, torch.Generator().manual_seed(7)
    )
    return Task(
        model=lambda: ByteGPT(layers=1, width=64, context=CONTEXT),
        draw=lambda generator: demo_data.draw(corpus.train, WINDOWS, CONTEXT, generator),
        held_out=held_out,
        optimizer=torch.optim.AdamW,
        defaults={"betas": (0.9, 0.95), "weight_decay": 0.1},
        learning_rate=4e-3,
        steps=steps,
    )


def gpt_long(steps: int = 240) -> Task:
    """A GPT of twice the width in the smallest packets, so that its streams are ten times as long:
    as those of a larger model. 233,856 parameters."""
    return replace(
        gpt(steps),
        model=lambda: ByteGPT(layers=1, width=128, context=CONTEXT),
        learning_rate=3e-3,
        mtu=576,
    )


class ByteLSTM(nn.Module):
    """One layer of 128 units, whose state goes from byte to byte."""

    def __init__(self, units: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, units // 2)
        self.layer = nn.LSTM(units // 2, units, batch_first=True)
        self.head = nn.Linear(units, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        states, _ = self.layer(self.embedding(text))
        logits: Tensor = self.head(states)
        return logits


def lstm(steps: int = 240) -> Task:
    """The same bytes, by a recurrent network. 149,000 parameters, AdamW."""
    return replace(gpt(steps), model=ByteLSTM, learning_rate=1e-2)


DIGITS_BATCH = 128
DIGITS_HELD_OUT = 597


@lru_cache(maxsize=1)
def split_digits() -> tuple[Pair, Pair]:
    """scikit-learn's 1,797 digits of 8 x 8 pixels; the test's are drawn once and for all."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(7))
    x = torch.tensor(images, dtype=torch.float32)[order] / 16
    y = torch.tensor(labels, dtype=torch.long)[order]
    cut = DIGITS_HELD_OUT
    return (x[cut:], y[cut:]), (x[:cut], y[:cut])


def digits(steps: int = 60) -> Task:
    """Handwritten digits, by a network of two hidden layers. 85,000 parameters, SGD."""
    (images, labels), held_out = split_digits()

    def draw(generator: torch.Generator) -> Pair:
        chosen = torch.randint(len(labels), (DIGITS_BATCH,), generator=generator)
        return images[chosen], labels[chosen]

    def model() -> nn.Module:
        return nn.Sequential(
            *(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        )

    return Task(
        model=model,
        draw=draw,
        held_out=held_out,
        optimizer=torch.optim.SGD,
        defaults={"momentum": 0.9, "weight_decay": 1e-3},
        # A rate so high, and so few steps, that the network is still learning at the end: with more
        # time it learns these digits whatever is lost, and nothing could be told apart.
        learning_rate=0.3,
        steps=steps,
    )


TASKS: Mapping[str, Callable[..., Task]] = {
    "gpt": gpt,
    "gpt-long": gpt_long,
    "digits": digits,
    "lstm": lstm,
}
