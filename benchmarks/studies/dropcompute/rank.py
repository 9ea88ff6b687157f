"""One rank of the benchmark: ``python -m benchmarks.studies.dropcompute.rank CONFIG``.

Trains the demo's model by DDP over the lossy backend. Every micro-batch takes as long as the
paper's simulated delay says: what it doesn't compute it sleeps, so that two cores serve four ranks.
The delays of a step are the same for every variant to train.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from benchmarks.common.delays import Delayed
from lossycoll.cli.demo import corpus as demo_data
from lossycoll.cli.demo.model import ByteGPT, next_byte_loss
from lossycoll.cli.demo.worker import learning_rate
from lossycoll.cli.launcher import EventWriter

from .runs import CONTEXT, LAYERS, MICRO_BATCHES, VARIANTS, Run

SLICE = 0.001
"""Seconds between two looks at the clock within a delay."""
VALIDATE_STEPS = 10
WINDOWS = 192
"""Of held-out text, 64 bytes each."""


class Rank:
    def __init__(self, run: Run) -> None:
        budget, rank = run.budget, dist.get_rank()
        self.run = run
        self.variant = VARIANTS[run.variant]
        corpus = demo_data.load(budget.seed)
        torch.manual_seed(budget.seed)
        self.model = ByteGPT(LAYERS, budget.width, CONTEXT)
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(
            self.ddp.parameters(), betas=(0.9, 0.95), weight_decay=0.1
        )
        draws = torch.Generator().manual_seed(budget.seed * 10_007 + rank + 1)
        self.batches = self._batches(corpus.train, draws)
        held_out = torch.Generator().manual_seed(budget.seed)
        self.held_out = demo_data.draw(corpus.validation, WINDOWS, CONTEXT, held_out)
        delay = Delayed(run.clean, run.factor)
        generator = np.random.default_rng([budget.seed, rank])
        self.seconds = delay.draw(generator, (budget.steps, MICRO_BATCHES))
        self.drop = lossycoll.DropCompute(
            self.ddp,
            MICRO_BATCHES,
            "auto" if self.variant.dropping else float("inf"),
            divisor=self.variant.divisor,
            skip=budget.skip,
            warm_up=budget.warm_up,
            cut=self.variant.cut,  # type: ignore[arg-type]
            # One machine, one load: what is measured once holds for all of a run.
            tolerance=10.0,
        )
        self.backward = 0.0
        """Seconds that the last backward pass took."""

    def _batches(self, text: Tensor, draws: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield demo_data.draw(text, self.run.budget.batch, CONTEXT, draws)

    def step(self, number: int) -> list[float]:
        """One step; the seconds of each micro-batch."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, self.run.budget.steps)
        loop = self.drop(self.batches)
        for at, (inputs, targets) in enumerate(loop):
            begun = time.perf_counter()
            loss = next_byte_loss(self.ddp(inputs), targets) / MICRO_BATCHES
            until = begun + self.seconds[number, at] - self.backward
            while (rest := until - time.perf_counter()) > 0:
                if self.variant.cut == "threshold":
                    if loop.late:
                        break
                    rest = min(rest, SLICE)
                time.sleep(rest)
            else:
                before = time.perf_counter()
                loss.backward()  # type: ignore[no-untyped-call]
                self.backward = time.perf_counter() - before
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loop._record.laps  # of a step that is over

    @torch.no_grad()
    def validate(self) -> float:
        inputs, targets = self.held_out
        return float(next_byte_loss(self.model(inputs), targets))

    def train(self, report: EventWriter | None) -> dict[str, Any]:
        budget = self.run.budget
        laps, seconds, completed = [], [], []
        losses: list[tuple[int, float]] = []
        for number in range(budget.steps):
            if number % VALIDATE_STEPS == 0:
                if dist.get_rank() == 0:
                    losses.append((number, self.validate()))
                dist.barrier()
            begun = time.perf_counter()
            laps.append(self.step(number))
            seconds.append(time.perf_counter() - begun)
            last = self.drop.report().last
            assert last is not None
            completed.append(last.total_completed)
            if report is not None:
                report.write(kind="step", step=number + 1, loss=losses[-1][1])
        if dist.get_rank() == 0:
            losses.append((budget.steps, self.validate()))
        choice = self.drop.choice
        return {
            "laps": laps,
            "step_seconds": seconds,
            "completed": completed,
            "losses": losses,
            "threshold": None if choice is None else choice.threshold,
            "promised": None if choice is None else choice.speedup,
        }


def main() -> None:
    path = Path(sys.argv[1])
    config = json.loads(path.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    rank = Rank(Run.of(config["run"]))
    report = EventWriter(config["events"]) if dist.get_rank() == 0 else None
    figures = rank.train(report)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, figures)
    if dist.get_rank() == 0:
        (path.parent / "ranks.json").write_text(json.dumps(gathered), encoding="utf-8")
    del rank
    gc.collect()  # DDP is part of a reference cycle, and holds the group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
