"""Drift over many steps, by real ranks with DriftBound itself: run by tests/support/harness.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lossycoll
from tests.support.harness import init

ENV = {
    "LOSSYCOLL_REPAIR": "0",  # of gradients, whatever DriftBound would have
    "LOSSYCOLL_LOSSY_MIN_BYTES": "0",
    "LOSSYCOLL_MTU": "576",
    "LOSSYCOLL_REORDER_MIN": "0.0002",
    "LOSSYCOLL_LOG": "off",
}
BETAS = {"momentum_buffer": 0.9, "exp_avg": 0.9, "exp_avg_sq": 0.999}
"""What optimizers keep, and by how much it fades at each step."""


def env(loss: float, **settings: Any) -> dict[str, str]:
    """The environment of a job: loss, and what the ranks read by :func:`settings`."""
    return {
        **ENV,
        "LOSSYCOLL_INJECT": f"loss={loss},seed=9",
        "THEORY": json.dumps(settings),
    }


def settings() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.environ["THEORY"])
    return found


def steps(rank: int, world: int) -> dict[str, Any]:
    """Replicas that step by means of N(0, 1) as they arrive: one that is free, and one for each of
    ``repairs`` that a DriftBound looks after. All step by the same means, by which the state of
    free optimizers that have any is formed as well."""
    torch.set_num_threads(1)
    init()
    wanted = settings()
    elements, period = wanted["elements"], wanted["period"]
    models = [nn.ParameterList([torch.zeros(elements)]) for _ in range(1 + len(wanted["repairs"]))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    for model, optimizer, repair in zip(models[1:], optimizers[1:], wanted["repairs"], strict=True):
        lossycoll.DriftBound(model, optimizer, period, repair=repair)
    free = nn.Parameter(torch.zeros(elements))
    stateful = [
        torch.optim.SGD([free], lr=1.0, momentum=BETAS["momentum_buffer"]),
        torch.optim.Adam([free], betas=(BETAS["exp_avg"], BETAS["exp_avg_sq"])),
    ]
    generator = torch.Generator().manual_seed(rank)
    at: list[int] = []
    drifts: list[list[float]] = []
    states: dict[str, list[float]] = {name: [] for name in BETAS}
    for step in range(wanted["steps"]):
        gradient = torch.randn(elements, generator=generator)
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
        for model, optimizer in zip(models, optimizers, strict=True):
            model[0].grad = gradient
            optimizer.step()
        free.grad = gradient
        for other in stateful:
            other.step()
        if (step + 1) % wanted["every"] == 0:
            at.append(step + 1)
            drifts.append([lossycoll.measure_drift(model).total / elements for model in models])
            for name, value in state_drift(stateful).items():
                states[name].append(value / elements)
    injected = lossycoll.stats().packets_injected
    dist.destroy_process_group()
    series = list(zip(*drifts, strict=True))
    return {"at": at, "drifts": series, "states": states, "injected": injected}


def state_drift(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, float]:
    """The distance between ranks of the element-wise state of all parameters, by its key."""
    found: dict[str, list[nn.Parameter]] = {}
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key in BETAS.keys() & state.keys():
                found.setdefault(key, []).append(nn.Parameter(state[key], requires_grad=False))
    lists = nn.ModuleDict({key: nn.ParameterList(found[key]) for key in sorted(found)})
    drifts = lossycoll.measure_drift(lists).per_parameter
    return {
        key: sum(value for name, value in drifts.items() if name.startswith(f"{key}."))
        for key in sorted(found)
    }


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.2),
    "SGD, momentum 0.9": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-4),
}
Variant = tuple[int, int, bool]
"""Period (0: no DriftBound), repair, state."""


def train(
    rank: int, name: str, variant: Variant, steps: int
) -> Iterator[tuple[int, Any, Any, int]]:
    """A small network under DDP: after each step its number, the model, the optimizer, and the
    bytes that DriftBound sends."""
    period, repair, state = variant
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    sent = 0
    if period:
        bound = lossycoll.DriftBound(wrapped, optimizer, period, repair=repair, state=state)
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        inputs = torch.randn(32, 64, generator=generator)
        noise = torch.randn(32, 64, generator=generator)
        optimizer.zero_grad()
        target = torch.tanh(inputs.flip(1)) + 0.5 * noise
        (wrapped(inputs) - target).square().mean().backward()
        optimizer.step()
        if period:
            sent = bound.bytes_per_step
        yield step, model, optimizer, sent


def optimizers(rank: int, world: int) -> list[dict[str, Any]]:
    """By each optimizer and each of ``variants``: the drift over the second half, and what a step
    sends."""
    torch.set_num_threads(1)
    init()
    wanted = settings()
    out = []
    for name in OPTIMIZERS:
        for variant in wanted["variants"]:
            drifts, bytes_per_step = [], 0
            for step, model, _, sent in train(rank, name, variant, wanted["steps"]):
                bytes_per_step = sent
                if step > wanted["steps"] // 2 and step % 13 == 0:
                    drifts.append(lossycoll.measure_drift(model).total)
            period, repair, state = variant
            out.append(
                {
                    "optimizer": name,
                    "period": period,
                    "repair": repair,
                    "state": state,
                    "drift": sum(drifts) / len(drifts),
                    "bytes_per_step": bytes_per_step,
                }
            )
    dist.destroy_process_group()
    return out


def states(rank: int, world: int) -> list[dict[str, Any]]:
    """The drift of ``optimizer``'s parameters and of its state, every so many steps, by each of
    ``variants``."""
    torch.set_num_threads(1)
    init()
    wanted = settings()
    out = []
    for variant in wanted["variants"]:
        at: list[int] = []
        series: dict[str, list[float]] = {}
        for step, model, optimizer, _ in train(rank, wanted["optimizer"], variant, wanted["steps"]):
            if (step + 1) % wanted["every"] == 0:
                at.append(step + 1)
                series.setdefault("parameters", []).append(lossycoll.measure_drift(model).total)
                for key, value in state_drift([optimizer]).items():
                    series.setdefault(key, []).append(value)
        out.append(
            {"optimizer": wanted["optimizer"], "period": variant[0], "at": at, "drift": series}
        )
    dist.destroy_process_group()
    return out
