"""Drift over many steps, by real ranks with DriftBound itself: run by tests/harness.py."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist
from harness import init
from torch import nn

import lossycoll

ENV = {
    "LOSSYCOLL_REPAIR": "0",  # of gradients, whatever DriftBound would have
    "LOSSYCOLL_LOSSY_MIN_BYTES": "0",
    "LOSSYCOLL_MTU": "576",
    "LOSSYCOLL_REORDER_MIN": "0.0002",
    "LOSSYCOLL_LOG": "off",
}


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
    ``repairs`` that a DriftBound looks after. All step by the same means."""
    torch.set_num_threads(1)
    init()
    wanted = settings()
    elements, period = wanted["elements"], wanted["period"]
    models = [nn.ParameterList([torch.zeros(elements)]) for _ in range(1 + len(wanted["repairs"]))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    for model, optimizer, repair in zip(models[1:], optimizers[1:], wanted["repairs"], strict=True):
        lossycoll.DriftBound(model, optimizer, period, repair=repair)
    generator = torch.Generator().manual_seed(rank)
    at: list[int] = []
    drifts: list[list[float]] = []
    for step in range(wanted["steps"]):
        gradient = torch.randn(elements, generator=generator)
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
        for model, optimizer in zip(models, optimizers, strict=True):
            model[0].grad = gradient
            optimizer.step()
        if (step + 1) % wanted["every"] == 0:
            at.append(step + 1)
            drifts.append([lossycoll.measure_drift(model).total / elements for model in models])
    injected = lossycoll.stats().packets_injected
    dist.destroy_process_group()
    return {"at": at, "drifts": list(zip(*drifts, strict=True)), "injected": injected}


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.2),
    "SGD, momentum 0.9": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-4),
}


def optimizers(rank: int, world: int) -> list[dict[str, Any]]:
    """A small network under DDP, by each optimizer and each of ``arms`` (period, repair, state);
    the drift over the second half, and what a step sends."""
    torch.set_num_threads(1)
    init()
    wanted = settings()
    out = []
    for name, make in OPTIMIZERS.items():
        for period, repair, state in wanted["arms"]:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
            wrapped = nn.parallel.DistributedDataParallel(model)
            optimizer = make(model.parameters())
            bound = None
            if period:
                bound = lossycoll.DriftBound(wrapped, optimizer, period, repair=repair, state=state)
            generator = torch.Generator().manual_seed(rank)
            drifts = []
            for step in range(wanted["steps"]):
                inputs = torch.randn(32, 64, generator=generator)
                noise = torch.randn(32, 64, generator=generator)
                optimizer.zero_grad()
                target = torch.tanh(inputs.flip(1)) + 0.5 * noise
                (wrapped(inputs) - target).square().mean().backward()
                optimizer.step()
                if step > wanted["steps"] // 2 and step % 13 == 0:
                    drifts.append(lossycoll.measure_drift(model).total)
            out.append(
                {
                    "optimizer": name,
                    "period": period,
                    "repair": repair,
                    "state": state,
                    "drift": sum(drifts) / len(drifts),
                    "bytes_per_step": bound.bytes_per_step if bound is not None else 0,
                }
            )
            del wrapped
    dist.destroy_process_group()
    return out
