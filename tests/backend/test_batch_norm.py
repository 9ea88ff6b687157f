"""SyncBatchNorm: statistics of activations come whole, and its gradient's sums as the table says.

torch has its arithmetic for GPUs alone. Here that is done by formulas, and everything that goes
between ranks is torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

import lossycoll
from tests.support.harness import init, run_ranks

LOSSY = {
    "LOSSYCOLL_LOG": "off",
    "LOSSYCOLL_INJECT": "loss=20%,seed=7",
    "LOSSYCOLL_DEADLINE_MIN": "0.02",
    "LOSSYCOLL_MTU": "1500",
}
FEW, MANY = 1_000, 8_000
"""Channels: their gradient's two sums are below, and above, what may be lossy by default."""
BATCH, STEPS, EPS = 6, 3, 1e-5


def stats(inputs: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs.mean(0), (inputs.var(0, correction=0) + eps).rsqrt()


def gather_stats(
    inputs: torch.Tensor,
    means: torch.Tensor,
    invstds: torch.Tensor,
    running_mean: None,
    running_var: None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    share = (counts / counts.sum())[:, None]
    mean = (means * share).sum(0)
    var = ((invstds**-2 - eps + (means - mean) ** 2) * share).sum(0)
    return mean, (var + eps).rsqrt()


def normalize(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    return (inputs - mean) * invstd * weight + bias


def reduce_gradient(
    gradient: torch.Tensor,
    inputs: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    total, by_input = gradient.sum(0), (gradient * (inputs - mean)).sum(0)
    return total, by_input, by_input * invstd, total


def input_gradient(
    gradient: torch.Tensor,
    inputs: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor,
    total: torch.Tensor,
    by_input: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    n = counts.sum()
    return (gradient - total / n - (inputs - mean) * invstd**2 * by_input / n) * invstd * weight


ARITHMETIC = {
    "batch_norm_stats": stats,
    "batch_norm_gather_stats_with_counts": gather_stats,
    "batch_norm_elemt": normalize,
    "batch_norm_backward_reduce": reduce_gradient,
    "batch_norm_backward_elemt": input_gradient,
}


class OnCpu(torch.nn.SyncBatchNorm):
    """Its own forward refuses tensors that are on no GPU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        apply: Callable[..., torch.Tensor] = torch.nn.modules._functions.SyncBatchNorm.apply
        own = (self.weight, self.bias, None, None, self.eps, 0.1)
        return apply(input, *own, dist.group.WORLD, dist.get_world_size())


def rank_batch_norm(rank: int, world: int) -> dict[int, tuple[bool, int, bool, int]]:
    """By channels: whether outputs and gradients are those of the whole batch, and packets that
    were missing in the forward passes and in the backward ones."""
    init(timeout=30)
    for name, function in ARITHMETIC.items():
        setattr(torch, name, function)
    found = {}
    for channels in (FEW, MANY):
        layer = OnCpu(channels, eps=EPS)
        exact, missing = [True, True], [0, 0]
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            whole = torch.randn(world, BATCH, channels, generator=generator)
            factor = torch.randn(world, BATCH, channels, generator=generator)
            own = whole[rank].clone().requires_grad_()
            marks = [lossycoll.stats().packets_missing]
            out = layer(own)
            marks.append(lossycoll.stats().packets_missing)
            torch.autograd.backward((out * factor[rank]).sum())
            marks.append(lossycoll.stats().packets_missing)
            want = whole.flatten(0, 1).requires_grad_()
            plain = functional.batch_norm(want, None, None, training=True, eps=EPS)
            torch.autograd.backward((plain * factor.flatten(0, 1)).sum())
            assert want.grad is not None
            assert own.grad is not None
            pairs = (plain, out), (want.grad, own.grad)
            for i, (all_of, one) in enumerate(pairs):
                mine = all_of[rank * BATCH : (rank + 1) * BATCH]
                exact[i] &= torch.allclose(mine, one, rtol=1e-3, atol=1e-4)
                missing[i] += marks[i + 1] - marks[i]
        found[channels] = (exact[0], missing[0], exact[1], missing[1])
    assert lossycoll.stats().packets_injected > 0
    dist.destroy_process_group()
    return found


def test_statistics_are_those_of_the_whole_batch() -> None:
    for outcome in run_ranks(rank_batch_norm, 2, LOSSY):
        assert not outcome.error, outcome
        few, many = outcome.value[FEW], outcome.value[MANY]
        assert few == (True, 0, True, 0)
        assert many[:2] == (True, 0)
        assert many[2] is False
        assert many[3] > 0
