"""The time of compressing and unpacking alone, on one core: a group of one rank has no network."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

import lossycoll

SHAPES = {
    "8 of 1024 x 1024": [(1024, 1024)] * 8,
    "GPT, width 256": [
        (256, 256),
        (64, 256),
        *[(768, 256), (256, 256), (1024, 256), (256, 1024)] * 2,
    ],
}
ROUNDS = 15
WIRE_RANKS = 4


@dataclass
class Bucket:
    """As hooks see DDP's."""

    flat: Tensor
    shapes: Sequence[tuple[int, ...]]

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        parts = self.flat.split(sizes)  # type: ignore[no-untyped-call]
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


Compress = Callable[[Bucket], Any]


def variants() -> dict[str, Callable[[], Compress]]:
    """By name, what makes a function that takes a bucket through one step."""

    def sgd(rank: int) -> Callable[[], Compress]:
        def make() -> Compress:
            state = powersgd.PowerSGDState(
                None, rank, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8
            )
            state.iter = 2
            return lambda bucket: powersgd.powerSGD_hook(state, bucket).wait()

        return make

    def arc(**how: Any) -> Callable[[], Compress]:
        def make() -> Compress:
            state = lossycoll.ARCTopKState(start_iter=0, **how)

            def compress(bucket: Bucket) -> None:
                gradients = bucket.gradients()
                keys = [str(i) for i in range(len(gradients))]
                state.reduce(keys, gradients, bucket.flat)
                state.iter += 1

            return compress

        return make

    out = {"PowerSGD 1": sgd(1), "PowerSGD 4": sgd(4)}
    for ratio in (0.2, 0.05):
        for rule in ("none", "ef14", "ef21", "ef21m"):
            out[f"ARC {ratio:g}, {rule}"] = arc(ratio=ratio, error_feedback=rule)
    out["Rand-K 0.2, ef14"] = arc(ratio=0.2, error_feedback="ef14", method="randk")
    out["Top-K 0.05, ef14"] = arc(ratio=0.05, error_feedback="ef14", method="topk")
    return out


def share(name: str, shapes: Sequence[tuple[int, int]]) -> float:
    """Bytes on the wire of a ring or a transpose over ``WIRE_RANKS``, as a share of dense ones."""
    kind, _, rest = name.partition(" ")
    number = float(rest.partition(",")[0])
    total = sum(m * n for m, n in shapes)
    if kind == "PowerSGD":
        return sum((m + n) * number for m, n in shapes) / total
    if kind == "Top-K":  # an index and a value, to all others
        return 2 * number * (WIRE_RANKS - 1) / (2 * (WIRE_RANKS - 1) / WIRE_RANKS)
    return number + (0.0 if kind == "Rand-K" else sum(4 * m for m, _ in shapes) / total)


def measure_speed() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    out = []
    for model, shapes in SHAPES.items():
        numel = sum(m * n for m, n in shapes)
        made = {name: make() for name, make in variants().items()}
        gradient = torch.randn(numel)
        times: dict[str, list[float]] = {name: [] for name in made}
        for number in range(ROUNDS):
            for name, compress in made.items():
                bucket = Bucket(gradient.clone(), shapes)
                began = time.perf_counter()
                compress(bucket)
                if number >= 3:
                    times[name].append(time.perf_counter() - began)
        for name, seconds in times.items():
            out.append(
                {
                    "model": model,
                    "variant": name,
                    "ms_per_mb": 1e3 * statistics.median(seconds) / (4e-6 * numel),
                    "share": share(name, shapes),
                }
            )
    dist.destroy_process_group()
    return out
