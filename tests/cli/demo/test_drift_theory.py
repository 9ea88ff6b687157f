"""The drift that the demo foretells: its formulas against replicas that are simulated in numpy, and
all of it against real ranks whose blocks are all alike, so that few of them tell."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

import lossycoll
from lossycoll.cli.demo import drift_theory
from lossycoll.cli.demo import worker as demo_train
from lossycoll.cli.demo.methods import DRIFT_BOUND, SHARDED, wrap_sharded
from lossycoll.train.sharded.parameter_sync import MAX_AGE, TOO_MANY, Staleness
from tests.support.harness import init, run_good

Values = NDArray[np.float64]
STEPS = 60


def walk(
    rng: np.random.Generator, shape: tuple[int, ...], momentum: float = 0.9
) -> Iterator[Values]:
    """Steps of elements that, as Adam's, keep their direction for 1 / (1 - momentum) of them."""
    velocity = np.zeros(shape)
    while True:
        velocity = momentum * velocity + rng.standard_normal(shape)
        yield velocity


def apart(replicas: Values) -> float:
    """Squared distance of (world, elements), averaged over pairs."""
    pairs = itertools.combinations(replicas, 2)
    return float(np.mean([np.square(a - b).sum() for a, b in pairs]))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("missed", [0.02, 0.1, 0.3])
def test_drift_of_stale_blocks(world: int, missed: float) -> None:
    rng = np.random.default_rng(5)
    blocks = 16_000
    receivers = np.arange(world)
    owners = np.arange(world)[:, None]
    behind = np.full(world, missed > TOO_MANY)
    books = [Staleness(rank, [blocks // world] * world, MAX_AGE) for rank in range(world)]
    trail = [np.zeros((world, blocks // world))]
    found, expected = 0.0, 0.0
    for step, moves in zip(range(STEPS), walk(rng, trail[0].shape), strict=False):
        trail.append(trail[-1] + moves)
        for book in books:
            needed = book.needed(behind)
            came = rng.random(moves.shape) >= missed
            book.advance(came if needed is None else came | needed)
        if step < STEPS // 2:
            continue
        history = np.stack(trail[-1 : -MAX_AGE - 2 : -1])
        columns = np.arange(blocks // world)
        held = [history[books[rank].values, owners, columns].ravel() for rank in receivers]
        moved = [float(np.square(history[0] - old).sum()) for old in history]
        found += apart(np.stack(held))
        expected += drift_theory.stale_drift(moved, world, missed)
    assert found == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("missed", "momentum"), [(0.001, 0.9), (0.1, 0.0)])
def test_drift_of_replicas_that_a_sweep_brings_together(
    world: int, missed: float, momentum: float
) -> None:
    rng = np.random.default_rng(6)
    elements, period = 16_000, 8
    replicas = np.zeros((world, elements))
    own = [replicas]
    found, expected = 0.0, 0.0
    for step, moves in zip(range(STEPS), walk(rng, replicas.shape, momentum), strict=False):
        swept = np.arange(step % period, elements, period)
        owner = rng.integers(world, size=len(swept))
        came = rng.random((world, len(swept))) >= missed
        replicas[:, swept] = np.where(came, replicas[owner, swept], replicas[:, swept])
        replicas = replicas + moves
        own.append(own[-1] + moves)
        if step < STEPS // 2:
            continue
        added = [apart(own[-1] - old) for old in own[-1 : -period - 2 : -1]]
        found += apart(replicas)
        expected += drift_theory.bounded_drift(added, world, missed)
    assert found == pytest.approx(expected, rel=0.08)


def test_the_formulas_of_the_page_on_theory() -> None:
    """Steps of variance 1 that know nothing of each other."""
    far = [float(k) for k in range(80)]
    for loss in (0.1, 0.4):
        ages = [(1 - loss) * loss**k for k in range(80)]
        among_many = drift_theory.drift_by_age(ages, far, 10**9)
        assert among_many == pytest.approx(2 * loss / (1 - loss**2))
        assert drift_theory.drift_by_age(ages, far, 2) == pytest.approx(loss / (1 - loss))
    assert drift_theory.bounded_drift(far[:17], 4, 0) == pytest.approx(17 / 2)
    assert drift_theory.bounded_drift(far[:17], 2, 0.2) == pytest.approx(17 / 2 + 16 * 0.25)


LOSS = 0.2
ELEMENTS = 60_000


class Noise(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(ELEMENTS))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.values * gradient).sum()


def drifting(rank: int, world: int) -> dict[str, tuple[float, float, int]]:
    """By method: the mean drift, the one that is expected, and how many packets were missing."""
    torch.set_num_threads(1)
    init()
    out = {}
    # Resent: what parity leaves is missing by sets, of which there are few here.
    for method in (DRIFT_BOUND, replace(SHARDED, wrap=partial(wrap_sharded, repair=2))):
        model = Noise()
        prepared = method.prepare(model, torch.optim.AdamW, demo_train.ADAMW, LOSS)
        replica, optimizer = prepared.forward, prepared.optimizer
        generator = torch.Generator().manual_seed(rank)
        missing = lossycoll.stats().packets_missing
        found = []
        for step in range(1, 81):
            optimizer.zero_grad()
            replica(torch.randn(ELEMENTS, generator=generator)).backward()
            optimizer.step()
            if step > 32 and step % demo_train.DRIFT_EVERY == 0:
                prepared.wait_parameters()
                found.append(demo_train.drift_of(model, prepared.theory, LOSS))
        out[method.name] = (
            statistics.fmean(drift["mean_square_distance"] for drift in found),
            statistics.fmean(drift["expected"] for drift in found),
            lossycoll.stats().packets_missing - missing,
        )
        del prepared, replica, optimizer
    dist.destroy_process_group()
    return out


def test_drift_of_real_ranks_is_the_expected_one() -> None:
    env = {"LOSSYCOLL_INJECT": f"loss={LOSS},seed=3", "LOSSYCOLL_MTU": "576"}
    for by_method in run_good(drifting, 3, env):
        for found, expected, missing in by_method.values():
            assert missing > 100
            # Twice or half as much would be found out.
            assert found == pytest.approx(expected, rel=0.35)
