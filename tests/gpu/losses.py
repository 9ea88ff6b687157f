"""Packets lost on purpose: the same bits as for CPU tensors, and means that are unbiased."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor

import lossycoll
from tests.gpu.checks import Rank, Table
from tests.gpu.fresh_group import fresh_group
from tests.support.surface_kit import Op

TABLE = Table()

LOSS = {
    "lossy_min_bytes": 1024,
    "inject": "loss=0.1,seed=7",
    "mtu": 1500,
    "reorder_min": 0.05,
    "deadline_min": 2.0,
}
"""Losses are known to the engine when a stream ends, so the long waits cost nothing; without them
what a busy machine delivers late would be lost as well."""
SIZES = (3000, 20_000, 100_001, 300_000)
"""Of one chunk each: the operations of both kinds of tensors are the same."""


def _results(rank: Rank, device: str) -> tuple[list[Tensor], int]:
    """Of a fixed list of calls, in a group of its own, whose injected losses are always the same;
    and how many packets were lost."""
    found = []
    with fresh_group(pg_options=LOSS):
        for turn in range(12):
            size = SIZES[turn % len(SIZES)]
            generator = torch.Generator().manual_seed(10 * turn + rank.rank)
            t = torch.randn(size, generator=generator).to(device)
            if turn % 3 == 2:
                wide = torch.cat([t, t + 1]).contiguous()
                dist.reduce_scatter_single(t, wide, Op.AVG)
            else:
                dist.all_reduce(t, Op.AVG if turn % 3 else Op.SUM)
            found.append(t.cpu())
        return found, lossycoll.stats().packets_injected


@TABLE.check()
def the_same_bits_as_for_cpu_tensors(rank: Rank) -> None:
    want, lost = _results(rank, "cpu")
    again, _ = _results(rank, "cpu")
    assert lost > 0, "the fault did not happen"
    got, _ = _results(rank, rank.device)
    for turn, (one, other, third) in enumerate(zip(want, again, got, strict=True)):
        assert torch.equal(one, other), f"call {turn}: not a function of the seed"
        assert torch.equal(one, third), f"call {turn}: {(one != third).sum()} elements differ"


@TABLE.check()
def a_mean_of_many_is_unbiased(rank: Rank) -> None:
    """By count: what is lost leaves the mean of the others, so that a rank alone leans to its own
    row, and the ranks together don't lean. An operation is one observation."""
    size, calls = 40_000, 80
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randn(size, generator=generator) for _ in range(rank.world)]
    truth = sum(rows[1:], rows[0]).double() / rank.world
    direction = (rows[0] - rows[-1]).sign().double()
    leans = []
    with fresh_group(pg_options=LOSS):
        for _ in range(calls):
            t = rows[rank.rank].to(rank.device, copy=True)
            dist.all_reduce(t, Op.AVG)
            leans.append((t.cpu().double() - truth).mul(direction).mean())
        lost = lossycoll.stats().packets_injected
    assert lost > 0, "the fault did not happen"
    own = torch.stack(leans)
    everyone = [torch.zeros_like(own) for _ in range(rank.world)]
    dist.all_gather(everyone, own)
    assert _standard_errors(own) > 5, "a lean of one rank isn't seen"
    assert _standard_errors(torch.stack(everyone).mean(0)) < 4


@TABLE.check()
def a_scope_around_the_backward_pass(rank: Rank) -> None:
    """Gradients of a device are computed in threads of autograd's, and buckets reduced there."""
    from torch.nn.parallel import DistributedDataParallel

    with fresh_group(pg_options={**LOSS, "delivery": "reliable", "repair": 0}):
        model = torch.nn.Linear(400, 400).to(rank.device)
        parallel = DistributedDataParallel(model, device_ids=[0] if rank.cuda else None)
        x = torch.ones(8, 400, device=rank.device)
        missing = [lossycoll.stats().packets_missing]
        for scope in (contextlib.nullcontext(), lossycoll.lossy()):
            with scope:
                for _ in range(3):
                    parallel(x).sum().backward()
            rank.wait_for_device()
            missing.append(lossycoll.stats().packets_missing)
    assert missing[0] == missing[1] < missing[2], missing


def _standard_errors(samples: Tensor) -> float:
    """How far from zero their mean is."""
    assert samples.std() > 0
    return float(samples.mean().abs() / samples.std() * len(samples) ** 0.5)
