"""DropCompute over a network that loses packets, and after the loss of a rank.

The count of micro-batches is one and the same factor on all ranks, so the mean over those that were
completed is as unbiased as the mean that it multiplies.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from tests.support.dropcompute_cases import (
    Shuffled,
    check_close,
    dropping,
    gradients,
    inputs_of,
    loss_of,
    oracle,
)
from tests.support.harness import Ranks, await_ranks, die, init, kill_self, run_good
from tests.support.sharded_cases import sharded
from tests.support.waiting import until

WORLD, M = 4, 4
COUNTS = (1, 2, 3, 4)
STEPS = 120
PER_PACKET = 300
STANDARD_ERRORS = 4.0
LOSS = {
    "LOSSYCOLL_INJECT": "loss=0.2,seed=11",
    "LOSSYCOLL_LOSSY_MIN_BYTES": "0",
    "LOSSYCOLL_MTU": "1500",
    "LOSSYCOLL_LOG": "off",
}


def own(rank: int) -> float:
    """Every element of the gradient of a micro-batch; no mean of other ranks' is the same."""
    return float(1 << rank)


TRUTH = sum(count * own(rank) for rank, count in enumerate(COUNTS)) / sum(COUNTS)
WRONG = {
    "each rank by its own count": sum(map(own, range(WORLD))) / WORLD,
    "the fixed divisor": TRUTH * sum(COUNTS) / (M * WORLD),
}


class Flat(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16 * PER_PACKET))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def sample(drop: Any, trained: nn.Module, parameters: Any, rank: int) -> list[float]:
    """By step: the mean element of the averaged gradient that this rank ends with."""
    x = torch.full((16 * PER_PACKET,), own(rank))
    out = []
    for _ in range(STEPS):
        for _ in drop(range(COUNTS[rank])):
            (trained(x) / M).backward()
        grads = [p.grad for p in parameters() if p.grad is not None]
        out.append(float(torch.cat([grad.double().flatten() for grad in grads]).mean()))
        trained.zero_grad()
    assert drop.report().total_completed == STEPS * sum(COUNTS)
    return out


def under_loss(rank: int, world: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    init()
    if os.environ.get("LOSSYCOLL_ESTIMATOR"):
        for _ in range(4):  # rates are known from 1,000 packets of each link on
            dist.all_reduce(torch.zeros(500 * WORLD * PER_PACKET))
    model = Flat()
    ddp = DistributedDataParallel(model)
    out: dict[str, Any] = {"ddp": sample(dropping(ddp, M, 99.0), ddp, model.parameters, rank)}
    model = Flat()
    optimizer = sharded(model.parameters(), torch.optim.SGD, lr=0.0, bucket_bytes=1 << 20)

    def fragments() -> list[Tensor]:
        return optimizer.param_groups[0]["params"]  # type: ignore[no-any-return]

    model.zero_grad = optimizer.zero_grad  # type: ignore[method-assign]
    out["sharded"] = sample(dropping(optimizer, M, 99.0), model, fragments, rank)
    out["injected"] = lossycoll.stats().packets_injected
    dist.destroy_process_group()
    return out


@pytest.mark.parametrize(
    "estimator", ["", pytest.param("inverse_probability", marks=pytest.mark.long)]
)
def test_the_mean_over_completed_micro_batches_is_unbiased_under_loss(estimator: str) -> None:
    env = {"LOSSYCOLL_ESTIMATOR": estimator} if estimator else {}
    ranks = run_good(under_loss, WORLD, {**LOSS, **env})
    for found in ranks:
        assert found["injected"] > 500
    for way in ("ddp", "sharded"):
        steps = np.mean([found[way] for found in ranks], axis=0)
        assert len(steps) == STEPS
        error = steps.std(ddof=1) / np.sqrt(STEPS)
        assert error > 0
        assert abs(steps.mean() - TRUTH) < STANDARD_ERRORS * error, (way, steps.mean(), error)
        for wrong, value in WRONG.items():
            # What would be found wrong is: the test has power.
            assert abs(steps.mean() - value) > 3 * STANDARD_ERRORS * error, (way, wrong)


# ---- a rank dies ----

CONTINUE = {
    "LOSSYCOLL_ON_PEER_LOSS": "continue",
    "LOSSYCOLL_LIVENESS": "4",
    "LOSSYCOLL_LOG": "off",
}
VICTIM = 1
LEFT = tuple(rank for rank in range(3) if rank != VICTIM)


def continues(rank: int, world: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    init()
    model, plain = Shuffled(), Shuffled()
    ddp = DistributedDataParallel(model)
    bare = Shuffled(partly=True)
    drops = [dropping(ddp, M, 99.0), dropping(bare, M, skip=0, warm_up=3, window=4)]
    both = [(drops[0], ddp), (drops[1], bare)]

    def step(number: int) -> None:
        for drop, trained in both:
            for at, x in enumerate(drop(inputs_of(rank, number, n) for n in range(COUNTS[rank]))):
                (loss_of(trained, x) / M).backward()
                drop.clock.now += (1, 9, 1, 1)[at]

    def clear() -> None:
        for _, trained in both:
            trained.zero_grad()

    step(0)
    clear()
    die(VICTIM)
    for number in range(1, 4):  # in flight while it dies
        step(number)
        clear()
    until(lambda: lossycoll.stats().lost, "a lost rank", seconds=30)
    # Ranks may have dropped differently until they heard of it.
    dropped = drops[1].report().total_dropped
    counts = [0 if r == VICTIM else COUNTS[r] for r in range(world)]
    for number in range(4, 16):
        step(number)
        last = drops[0].report().last
        check_close(gradients(model), oracle(plain, number, counts), "without a rank")
        assert last.total_completed == sum(counts)
        assert last.factor == pytest.approx(M * len(LEFT) / sum(counts))
        clear()
    reports = drops[1].gather_report()
    return {
        "threshold": drops[1].threshold,
        "choices": drops[1].report().choices,
        "reported": [report.rank for report in reports],
        "dropped": drops[1].report().total_dropped - dropped,
    }


def test_it_continues_after_the_loss_of_a_rank() -> None:
    with Ranks(continues, 3, CONTINUE) as ranks:
        outcomes = ranks.collect(90)
    assert outcomes[VICTIM].code == -signal.SIGKILL, outcomes[VICTIM]
    left = [outcomes[rank] for rank in LEFT]
    for outcome in left:
        assert outcome.code == 0, outcome
        assert outcome.value["reported"] == list(LEFT)
        assert outcome.value["choices"] >= 1
        for name in ("threshold", "dropped"):
            assert outcome.value[name] == left[0].value[name]


BATCHES = (M, 1, M + 2)


def dies_at_the_end(rank: int, world: int) -> list[tuple[int, float]]:
    """Rank 0, which owns the only packet of the ranks' sums, dies while the others wait for it."""
    torch.set_num_threads(1)
    init()
    model = Shuffled()
    drop = dropping(model, M, 99.0)
    found = []
    for loop in drop.steps(inputs_of(rank, 0, n) for n in range(BATCHES[rank])):
        for x in loop:
            (loss_of(model, x) / M).backward()
            _get_default_store().set(f"computes/{rank}", "")
            if rank == 0:
                await_ranks("computes", range(1, world))
                time.sleep(0.5)
                kill_self()
        last = drop.report().last
        found.append((last.total_completed, last.factor))
        model.zero_grad()
    return found


def test_survivors_of_a_loss_at_the_end_of_a_loop_scale_and_end_alike() -> None:
    with Ranks(dies_at_the_end, 3, CONTINUE) as ranks:
        outcomes = ranks.collect(90)
    assert outcomes[0].code == -signal.SIGKILL, outcomes[0]
    wanted = [(1 + M, 2 * M / (1 + M)), (2, 2 * M / 2)]
    for outcome in outcomes[1:]:
        assert outcome.code == 0, outcome
        assert outcome.value == wanted
