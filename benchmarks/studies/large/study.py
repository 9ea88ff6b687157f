"""What loss costs a large GPT: ``python -m benchmarks large --sizes 124m --report docs``.

A row is one training: 8 replicas in turn on one device (the GPU, if there is one), with losses by
the engine's own functions. What is done isn't run again. A row that takes longer than
``--row-minutes`` is kept in ``--checkpoints`` and goes on from there the next time.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.common.results import STUDIES, Piece, Result
from benchmarks.common.runner import PieceFailed, Study, one_by_one
from benchmarks.common.tables import markdown, publish
from benchmarks.theory.owners import chosen
from lossycoll.cli.demo import corpus as demo_data
from lossycoll.cli.demo.model import ByteGPT, next_byte_loss
from lossycoll.plan.faults import Inject
from lossycoll.plan.order import FINER_PACKETS, STREAM_PACKETS
from lossycoll.plan.sets import NO_PARITY, Code

from .exchange import Exchange
from .replicas import METHODS, RELIABLE, Replicas

WORLD: Final = 8
LOSSES: Final = (0.2, 0.1, 0.4)
BURSTS: Final = (1.0, 8.0)
SEEDS: Final = 1
CURVE_STEPS: Final = 20


@dataclass(frozen=True)
class Size:
    """A GPT and how it is trained. ``batch`` is of windows, of all replicas together."""

    layers: int
    width: int
    context: int
    batch: int
    steps: int
    rate: float
    payload: int
    bucket_mib: float
    held_out: int


SIZES: Final = {
    "tiny": Size(1, 64, 32, 32, 60, 4e-3, 1408, 25.0, 64),
    "10m": Size(6, 384, 128, 32, 300, 1e-3, 1408, 25.0, 128),
    "124m": Size(12, 928, 256, 128, 400, 6e-4, 8896, 64.0, 256),
}
"""By name; 12 layers width^2 parameters each, and a vocabulary of bytes."""


@dataclass(frozen=True)
class Row(Piece):
    """One training."""

    size: str
    method: str
    loss: float
    burst: float
    seed: int

    @property
    def base(self) -> Row:
        return Row(self.size, RELIABLE, 0.0, 1.0, self.seed)


def rows(sizes: Sequence[str], seeds: int) -> Iterator[Row]:
    """The most important first."""
    for size in sizes:
        for seed in range(1, seeds + 1):
            yield Row(size, RELIABLE, 0.0, 1.0, seed)
            for loss in LOSSES:
                for burst in BURSTS:
                    for method in METHODS[:0:-1]:
                        yield Row(size, method, loss, burst, seed)


@lru_cache(maxsize=256)
def code_of(packets: int, loss: float, burst: float) -> Code:
    """What the engine would choose by true rates, to meet the default share without resending."""
    return chosen(packets, loss, burst).code


def exchange_of(row: Row) -> Exchange:
    """Plain DDP has nothing against loss; the methods have parity."""
    plain = row.method in (RELIABLE, "ddp")
    return Exchange(
        WORLD,
        Inject(loss=row.loss, burst=row.burst, seed=row.seed),
        SIZES[row.size].payload,
        code=lambda packets: NO_PARITY if plain else code_of(packets, row.loss, row.burst),
        rounds=None if row.method == RELIABLE else 0,
        stream_packets=0 if plain else STREAM_PACKETS,
        finer_packets=1 if plain else FINER_PACKETS,
        order_seed=row.seed,
    )


def rate_at(size: Size, step: int) -> float:
    """A linear warm-up over a tenth of the steps, then half a cosine down to 1%."""
    warm_up = max(1, size.steps // 10)
    if step < warm_up:
        return size.rate * (step + 1) / warm_up
    share = (step - warm_up) / max(1, size.steps - warm_up)
    return size.rate * (0.01 + 0.495 * (1 + math.cos(math.pi * share)))


class Training:
    """One row, step by step."""

    def __init__(self, row: Row, device: torch.device) -> None:
        self.row, self.size, self.device = row, SIZES[row.size], device
        size = self.size
        torch.manual_seed(row.seed)
        self.text = demo_data.load(seed=7)
        self.batches = torch.Generator().manual_seed(row.seed * 10_007)
        self.replicas = Replicas(
            row.method,
            lambda: ByteGPT(size.layers, size.width, size.context),
            lambda owned: torch.optim.AdamW(
                owned, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
            ),
            exchange_of(row),
            int(size.bucket_mib * (1 << 20)) // 4,
            device,
        )
        self.losses: list[float] = []
        self.seconds = 0.0

    def run(self, deadline: float) -> bool:
        """Trains until all steps are done, or time is up; returns whether they are."""
        size, began = self.size, time.monotonic()
        while self.replicas.steps < size.steps and time.monotonic() < deadline:
            inputs, targets = demo_data.draw(
                self.text.train, size.batch, size.context, self.batches
            )
            found = []
            for rank, model in enumerate(self.replicas.models):
                loss = self._loss(model, inputs[rank::WORLD], targets[rank::WORLD])
                loss.backward()  # type: ignore[no-untyped-call]
                found.append(loss.detach())
            self.losses.append(float(torch.stack(found).mean()))
            self.replicas.step(rate_at(size, self.replicas.steps))
        self.seconds += time.monotonic() - began
        return self.replicas.steps >= size.steps

    def _loss(self, model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = model(inputs.to(self.device))
        return next_byte_loss(logits.float(), targets.to(self.device))

    @torch.no_grad()
    def judged(self) -> list[float]:
        """Each replica's loss on unseen files, in nats per byte."""
        size, draws = self.size, torch.Generator().manual_seed(7)
        inputs, targets = demo_data.draw(self.text.validation, size.held_out, size.context, draws)
        found = []
        for model in self.replicas.models:
            pieces = inputs.split(16), targets.split(16)  # type: ignore[no-untyped-call]
            parts = zip(*pieces, strict=True)
            losses = [float(self._loss(model, *part)) * len(part[0]) for part in parts]
            found.append(sum(losses) / len(inputs))
        return found

    def figures(self) -> dict[str, Any]:
        traffic = self.replicas.exchange.traffic
        losses = self.judged()
        curve = [
            self.losses[at : at + CURVE_STEPS] for at in range(0, self.size.steps, CURVE_STEPS)
        ]
        return {
            "loss": sum(losses) / len(losses),
            "replicas": losses,
            "drift": self.replicas.drift(),
            "missing": traffic.missing / max(1, traffic.packets),
            "parity": traffic.parity / max(1, traffic.packets),
            "curve": [round(sum(part) / len(part), 4) for part in curve],
            "parameters": self.replicas.parameters,
            "steps": self.replicas.steps,
            "seconds": round(self.seconds, 1),
            "device": self.device.type,
        }

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "replicas": self.replicas.state(),
            "batches": self.batches.get_state(),
            "losses": self.losses,
            "seconds": self.seconds,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=False)
        self.replicas.load(state["replicas"])
        self.batches.set_state(state["batches"].cpu())
        self.losses, self.seconds = state["losses"], state["seconds"]


def train(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a row. PieceFailed: its time is up, and it goes on the next time."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.threads:
        torch.set_num_threads(options.threads)
    training = Training(row, device)
    kept = options.checkpoints / f"{row.key.replace('/', '_')}.pt"
    if kept.exists():
        training.load(kept)
    deadline = time.monotonic() + 60 * options.row_minutes if options.row_minutes else math.inf
    if not training.run(deadline):
        training.save(kept)
        raise PieceFailed(
            f"{training.replicas.steps} of {training.size.steps} steps are done and kept in "
            f"{kept}; run the same command again to go on"
        )
    figures = training.figures()
    kept.unlink(missing_ok=True)
    return figures


def _arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--sizes", default="tiny", help=f"some of {', '.join(SIZES)}, with commas (tiny)")
    add("--seeds", type=int, default=SEEDS, help="how many of each row")
    add("--device", default="", help="cpu or cuda (cuda where there is one)")
    add("--threads", type=int, default=0, help="threads of the CPU (torch's default)")
    add("--row-minutes", type=float, default=0, help="keep a row that takes longer (no limit)")
    add(
        "--checkpoints",
        type=Path,
        default=STUDIES / "large" / "checkpoints",
        help="where rows are kept that aren't done",
    )


def _plan(options: argparse.Namespace) -> list[Row]:
    sizes = options.sizes.split(",")
    unknown = sorted(set(sizes) - set(SIZES))
    if unknown:
        raise ValueError(f"no size is called {', '.join(unknown)}, wanted some of {list(SIZES)}")
    return list(rows(sizes, options.seeds))


def table(results: Sequence[Result]) -> str:
    """A line for each row, and what it costs against the base of its seed."""
    found = {Row.of(result.settings): result.figures for result in results}
    lines = []
    for row, figures in sorted(found.items(), key=lambda each: str(each[0])):
        base = found.get(row.base)
        cost = math.expm1(figures["loss"] - base["loss"]) if base else math.nan
        cell = "-" if row.method == RELIABLE or not base else f"{100 * cost:+.2f}%"
        kind = "single" if row.burst == 1 else f"bursts of {row.burst:g}"
        lines.append([
            *(row.size, f"{figures['parameters'] / 1e6:.3g} M", row.method, str(row.seed)),
            "-" if row.method == RELIABLE else f"{row.loss:.0%}, {kind}",
            *(f"{figures['loss']:.4f}", cell, f"{100 * figures['missing']:.2g}%"),
            *(f"{1 + figures['parity']:.2f}", f"{100 * figures['drift']:.2g}%"),
        ])  # fmt: skip
    head = (
        *("size", "parameters", "method", "seed", "loss of packets", "loss, nats"),
        *("change of perplexity", "missing", "packets", "distance"),
    )
    return markdown(head, lines)


def report(results: Sequence[Result], folder: Path) -> None:
    """The table of docs/quality.md, and all figures as JSON."""
    rows = [{**r.settings, **r.figures} for r in results]
    publish(folder, "large", rows, "quality.md", {"large": table(results)})


STUDY: Final = Study(
    name="large",
    description=__doc__ or "",
    plan=_plan,
    measuring=one_by_one(train),
    report=report,
    arguments=_arguments,
    alike=lambda row: (row.size, row.method),
)
