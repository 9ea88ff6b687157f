"""A peer of the study: ``python -m benchmarks.studies.swarm.peer CONFIG``, CONFIG as JSON.

Trains the demo's model with whoever averages. Reads lines of JSON: where to join and, unless it
comes late, that all have joined. Prints one for each thing that happens.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from lossycoll.cli.demo import corpus as demo_data
from lossycoll.cli.demo.model import ByteGPT, next_byte_loss
from lossycoll.cli.demo.worker import ADAMW, TrainConfig, Validation, learning_rate


def say(kind: str, **fields: Any) -> None:
    print(json.dumps({"kind": kind, "time": time.monotonic(), **fields}), flush=True)


def hear() -> dict[str, Any]:
    line = sys.stdin.readline()
    if not line:
        raise SystemExit("the study has ended")
    heard: dict[str, Any] = json.loads(line)
    return heard


class Training:
    """The model, its data and its optimizer; peers differ in the order of their data alone."""

    def __init__(self, config: TrainConfig, peer: int) -> None:
        self.config = config
        corpus = demo_data.load(config.seed)
        self._text = corpus.train
        torch.manual_seed(config.seed)
        self.model = ByteGPT(config.layers, config.width, config.context)
        self.inner = torch.optim.AdamW(self.model.parameters(), **ADAMW)
        self._batches = torch.Generator().manual_seed(config.seed * 10_007 + peer + 1)
        self._validation = Validation(corpus.validation, config)
        self.kept: list[tuple[float, int, list[Tensor]]] = []

    def run(self, averaging: Any, *, keeps: bool) -> None:
        """``keeps``: what each round ends with, so that judging it takes none of the time."""
        begin = time.monotonic()
        if keeps:
            self._keep(0.0, 0)
        while averaging.steps < self.config.steps:
            for group in self.inner.param_groups:
                group["lr"] = learning_rate(averaging.steps, self.config.steps)
            inputs, targets = demo_data.draw(
                self._text, self.config.batch, self.config.context, self._batches
            )
            averaging.zero_grad()
            next_byte_loss(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            done = averaging.step()
            if done is not None:
                spent = time.monotonic() - begin
                say("round", step=averaging.steps, spent=spent, **done)
                if keeps:
                    self._keep(spent, averaging.steps)

    def _keep(self, spent: float, step: int) -> None:
        self.kept.append((spent, step, [p.detach().clone() for p in self.model.parameters()]))

    def loss(self) -> float:
        return self._validation.loss(self.model)

    def curve(self) -> list[tuple[float, int, float]]:
        """(seconds, step, validation loss) of what was kept."""
        found = []
        for spent, step, values in self.kept:
            _put(values, self.model)
            found.append((round(spent, 3), step, self.loss()))
        return found


def _put(values: list[Tensor], model: nn.Module) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def main() -> None:
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    training = Training(TrainConfig(**config["train"]), config["peer"])
    by = importlib.import_module(f"benchmarks.studies.swarm.by_{config['by']}")
    say("ready")
    join = hear()["join"]
    with by.Averaging(config, training.model, training.inner, join) as averaging:
        say("in", places=averaging.places)
        if config["comes late"]:
            say("caught up", report=averaging.catch_up(), step=averaging.steps)
        else:
            hear()  # all are there
        say("begins", step=averaging.steps)
        training.run(averaging, keeps=config["peer"] == 0)
        say("trained", step=averaging.steps)
    say("done", loss=training.loss(), curve=training.curve())


if __name__ == "__main__":
    main()
