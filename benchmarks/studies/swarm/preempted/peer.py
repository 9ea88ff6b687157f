"""A peer's training: steps of a length that is its own, and whoever averages."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from lossycoll.cli.demo import corpus as demo_data
from lossycoll.cli.demo.model import ByteGPT, next_byte_loss
from lossycoll.cli.demo.worker import ADAMW, LEARNING_RATE, TrainConfig

from .runs import WATCHED

WARM_SECONDS: Final = 20.0
"""Until the learning rate is whole; then it stays. It follows the time that all have, so that a
peer that comes back has the others'."""
POLL_SECONDS: Final = 0.02
TOLD_SECONDS: Final = 1.0
"""A peer says how many steps it has had so often."""
GO: Final = "go"
"""The file that says when training begins, by the monotonic clock."""


def say(kind: str, **fields: Any) -> None:
    """One line, whole: a host and its peer share the pipe."""
    line = json.dumps({"kind": kind, "time": time.monotonic(), **fields}) + "\n"
    os.write(sys.stdout.fileno(), line.encode())


def keep(what: Any, path: Path) -> None:
    """Writes it, or leaves the file as it is where the peer is killed meanwhile."""
    part = path.with_suffix(".part")
    torch.save(what, part)
    part.replace(path)


def begin_of(folder: Path) -> float:
    """When training begins, or has begun."""
    path = folder / GO
    while not path.exists():
        time.sleep(POLL_SECONDS)
    return float(path.read_text())


@functools.cache
def text_of(seed: int) -> Tensor:
    """What is trained on."""
    return demo_data.load(seed).train


def warm_up(seed: int) -> None:
    """Loads what the first steps would load, without threads: peers are forked from here."""
    torch.set_num_threads(1)
    text_of(seed)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter], **ADAMW).step()  # loads torch's compiler
    torch.save(parameter, BytesIO())


def train(by: Any, config: dict[str, Any]) -> None:
    """Until the study ends it."""
    torch.set_num_threads(1)
    how = TrainConfig(**config["train"])
    text = text_of(how.seed)
    torch.manual_seed(how.seed)
    model = ByteGPT(how.layers, how.width, how.context)
    inner = torch.optim.AdamW(model.parameters(), **ADAMW)
    number, life, folder = config["peer"], config["life"], Path(config["folder"])
    batches = torch.Generator().manual_seed(how.seed * 10_007 + 101 * life + number + 1)
    averaging = by.Averaging(config, model, inner)
    say("in")
    begin = begin_of(folder)
    time.sleep(max(0.0, begin - time.monotonic()))
    averaging.begin()
    say("begins", peer=number, life=life)
    steps, told = 0, 0.0
    while True:
        started = time.monotonic()
        for group in averaging.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (started - begin + 0.5) / WARM_SECONDS)
        inputs, targets = demo_data.draw(text, how.batch, how.context, batches)
        inner.zero_grad()
        next_byte_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        time.sleep(max(0.0, config["step"] - (time.monotonic() - started)))
        done = averaging.step()
        steps += 1
        if time.monotonic() - told > TOLD_SECONDS:
            told = time.monotonic()
            say("steps", peer=number, life=life, steps=steps)
        if done is not None:
            at = time.monotonic()
            values = [parameter.detach() for parameter in model.parameters()]
            keep(values, folder / f"last-{number}.pt")
            if number == WATCHED:
                keep(values, folder / f"at-{at - begin:.3f}.pt")
            say("round", peer=number, life=life, steps=steps, at=at - begin, **done)
