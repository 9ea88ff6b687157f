"""Estimators: the rates that a rank believes, and means that are unbiased where links differ."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from lossycoll.options.fields import Options
from lossycoll.plan import Finish
from lossycoll.runtime.collectives.estimators import (
    BY_COUNT,
    ENOUGH,
    LEAST_RATE,
    MEMORY,
    Estimators,
)
from lossycoll.runtime.collectives.group_context import Members
from lossycoll.runtime.engine.reports import PeerStats
from tests.support.failure_cases import CALM
from tests.support.harness import init, run_good

STANDARD_ERRORS = 4.0


class Links:
    """Stands for the engine: what each link was offered, and delivered."""

    def __init__(self, world: int) -> None:
        self.offered = [0] * world
        self.delivered = [0] * world

    def send(self, rank: int, packets: int, rate: float) -> None:
        self.offered[rank] += packets
        self.delivered[rank] += round(packets * rate)

    def __call__(self, rank: int) -> PeerStats:
        return PeerStats(
            rank, "", 0, 0, 0, 0, 0, 1.0, offered=self.offered[rank], delivered=self.delivered[rank]
        )


INVERSE = Options(estimator="inverse_probability")
EVERYONE = Members(3, 1, (0, 1, 2))


def test_what_is_unknown_is_not_guessed() -> None:
    links = Links(3)
    choice = Estimators(3, links)
    assert choice.means(INVERSE, EVERYONE) == BY_COUNT
    links.send(0, ENOUGH, 0.5)
    links.send(2, ENOUGH - 1, 0.8)
    assert choice.means(INVERSE, EVERYONE) == BY_COUNT
    links.send(2, 1, 1.0)
    means = choice.means(INVERSE, EVERYONE)
    assert means.finish == Finish.WEIGHTED
    assert means.divisor == 3
    assert means.weights == pytest.approx((2.0, 1.0, 1.25), rel=5e-3)


def test_only_the_ranks_that_are_left_count() -> None:
    links = Links(3)
    links.send(0, 5000, 0.25)
    means = Estimators(3, links).means(INVERSE, Members(3, 1, (0, 1)))
    assert means.divisor == 2
    assert means.weights[:2] == pytest.approx((4.0, 1.0))


def test_rates_follow_the_link() -> None:
    links = Links(3)
    choice = Estimators(3, links)
    links.send(2, 10 * MEMORY, 1.0)
    links.send(0, 10 * MEMORY, 0.9)
    before = choice.means(INVERSE, EVERYONE).weights[0]
    for _ in range(100):
        links.send(0, MEMORY // 10, 0.5)
        after = choice.means(INVERSE, EVERYONE).weights[0]
    assert before == pytest.approx(1 / 0.9, rel=1e-3)
    assert after == pytest.approx(2.0, rel=1e-2)


def test_no_weight_is_without_bound() -> None:
    links = Links(3)
    for rank in (0, 2):
        links.send(rank, 5000, 2 * LEAST_RATE)
    weights = Estimators(3, links).means(INVERSE, EVERYONE).weights
    assert weights == pytest.approx((50.0, 1.0, 50.0))
    links.send(0, 10 * MEMORY, LEAST_RATE / 2)
    few = Estimators(3, links)
    assert few.means(INVERSE, EVERYONE) == BY_COUNT


@pytest.mark.parametrize("before", [0, 10 * MEMORY])
def test_a_link_that_delivers_nothing_is_reported_and_counted_without(
    before: int, caplog: pytest.LogCaptureFixture
) -> None:
    """And when it is back, nothing is remembered of that."""
    links = Links(3)
    choice = Estimators(3, links)
    links.send(2, 5000, 1.0)
    links.send(0, before, 0.9)
    choice.means(INVERSE, EVERYONE)
    with caplog.at_level("WARNING", "lossycoll"):
        for _ in range(20):
            links.send(0, ENOUGH // 10, 0.0)
            means = choice.means(INVERSE, EVERYONE)
    assert means == BY_COUNT
    (reported,) = caplog.messages
    assert reported.startswith("rank 1/3: the link from rank 0 (")
    for _ in range(9):
        links.send(0, ENOUGH // 10, 0.5)
        assert choice.means(INVERSE, EVERYONE) == BY_COUNT
    links.send(0, ENOUGH // 10, 0.5)
    assert choice.means(INVERSE, EVERYONE).weights == pytest.approx((2.0, 1.0, 1.0), rel=5e-3)


def test_other_estimators_ask_no_link() -> None:
    def never(rank: int) -> PeerStats:
        raise AssertionError(rank)

    choice = Estimators(3, never)
    assert choice.means(Options(), EVERYONE) == BY_COUNT
    assert choice.means(Options(estimator="zero_fill"), EVERYONE).weights == ()
    reliable = Options(estimator="inverse_probability", delivery="reliable")
    assert choice.means(reliable, EVERYONE) == BY_COUNT


# ---- unbiased where links lose differently: real ranks, real sockets ----

ELEMENTS = 40_000
OPERATIONS = 120
UNEVEN = "loss=0.1,link=0-1:0.6,link=0-2:0.6,seed=5"
"""Rank 0's contributions seldom reach the others."""


def rank_means(rank: int, world: int) -> dict[str, Any]:
    """By estimator: per operation, the mean over the packets that this rank reduced."""
    import torch
    import torch.distributed as dist

    import lossycoll

    init()
    own = float(10 if rank == 0 else 0)
    for _ in range(12):  # until every link is known
        dist.all_reduce(torch.full((ELEMENTS,), own))
    found: dict[str, Any] = {}
    for estimator in ("count", "inverse_probability", "zero_fill"):
        with lossycoll.lossy(estimator=estimator, lossy_min_bytes=0):
            scattered = []
            for _ in range(OPERATIONS):
                chunk = torch.empty(ELEMENTS // world)
                dist.reduce_scatter_single(
                    chunk, torch.full((ELEMENTS // world * world,), own), dist.ReduceOp.AVG
                )
                scattered.append(chunk.double().mean().item())
                # Copies that are repaired must not pass for what links deliver to sums.
                with lossycoll.lossy(repair=2, lossy_min_bytes=0):
                    dist.all_gather_single(torch.empty(world * 2000), torch.zeros(2000))
        found[estimator] = scattered
    found["lost"] = lossycoll.stats().packets_injected
    dist.destroy_process_group()
    return found


def standard_errors(samples: Any, truth: float) -> float:
    values = np.asarray(samples)
    return float(abs(values.mean() - truth) / (values.std(ddof=1) / len(values) ** 0.5))


def test_uneven_links_bias_the_count_and_not_the_weights() -> None:
    env = {**CALM, "LOSSYCOLL_INJECT": UNEVEN, "LOSSYCOLL_MTU": "1500"}
    world = 3
    found = run_good(rank_means, world, env)
    assert all(f["lost"] > 0 for f in found)
    truth = 10 / world
    for rank in (1, 2):  # what rank 0 reduces has its own contribution always
        weighted = found[rank]["inverse_probability"]
        assert standard_errors(weighted, truth) < STANDARD_ERRORS
        for biased in ("count", "zero_fill"):
            samples = found[rank][biased]
            assert standard_errors(samples, truth) > 2 * STANDARD_ERRORS, biased
            assert np.mean(samples) < truth


# ---- sharded training: owners that stay, and data that differ ----

SHARDED_WORLD = 4
EVEN = "loss=0.3,seed=6"
STEPS = 12
CHUNK_PACKETS = 100
UNEVEN_SHARDED = "loss=0.2,link=0-1:0.7,link=0-2:0.7,seed=5"
GIVEN = (1.0, 2.0, 16.0, 17.0)
"""What each rank's gradient is everywhere: far from the mean, and to no owner are the means of some
others' and of other others' alike."""
TRUTH = 9.0


def reduce(group: Any, packets: int) -> Any:
    """The packets of this rank's chunk by reduce_scatter_single."""
    import torch
    import torch.distributed as dist

    per_packet = group.block_bytes // 4
    chunk = torch.empty(packets * per_packet)
    source = torch.full((dist.get_world_size() * len(chunk),), GIVEN[dist.get_rank()])
    dist.reduce_scatter_single(chunk, source, dist.ReduceOp.AVG, group)
    return chunk[::per_packet].tolist()


def rank_sharded(rank: int, world: int) -> dict[str, Any]:
    """By what is asked for: per step, the packets of the mean gradient that this rank owns."""
    import torch
    import torch.distributed as dist

    import lossycoll

    init()
    assert isinstance(dist.group.WORLD, lossycoll.backend.process_group.LossyProcessGroup)
    found: dict[str, Any] = {}
    with lossycoll.lossy(lossy_min_bytes=0):
        found["reduce-scatter"] = [reduce(dist.group.WORLD, CHUNK_PACKETS) for _ in range(STEPS)]

    def gradients(group: Any, steps: int, **rest: Any) -> list[list[float]]:
        per_packet = group.block_bytes // 4
        elements = world * CHUNK_PACKETS * per_packet
        weights = torch.nn.Parameter(torch.zeros(elements))
        optimizer = lossycoll.ShardedOptimizer(
            [weights], torch.optim.SGD, group, bucket_bytes=4 * elements, lr=1.0, **rest
        )
        out = []
        for _ in range(steps):
            optimizer.zero_grad()
            (weights.sum() * GIVEN[rank]).backward()
            fragment, *_ = optimizer.param_groups[0]["params"]
            out.append(fragment.grad[::per_packet].tolist())
        return out

    found["sharded"] = gradients(dist.group.WORLD, STEPS, repair=0)
    # Rates are guessed from what came before: the first steps are left out.
    for estimator, first in (("count", 0), ("inverse_probability", 2 * STEPS)):
        options = lossycoll.Options(estimator=estimator, inject=UNEVEN_SHARDED)
        group = dist.new_group(pg_options=options)
        found[estimator] = gradients(group, first + 2 * STEPS, repair=2)[first:]
        found[f"lost, {estimator}"] = lossycoll.stats(group).packets_injected
    found["lost"] = lossycoll.stats().packets_injected
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def sharded() -> list[dict[str, Any]]:
    env = {**CALM, "LOSSYCOLL_INJECT": EVEN, "LOSSYCOLL_MTU": "576"}
    return run_good(rank_sharded, SHARDED_WORLD, env)


def by_count(rank: int, mean: float) -> float:
    """What dividing the sum by its count would have made of the contributions in this mean."""
    others = [GIVEN[r] for r in range(SHARDED_WORLD) if r != rank]
    for k in range(1, SHARDED_WORLD):
        for some in itertools.combinations(others, k):
            weighed = (GIVEN[rank] + (SHARDED_WORLD - 1) * sum(some) / k) / SHARDED_WORLD
            if mean == pytest.approx(weighed, rel=1e-6):
                return (GIVEN[rank] + sum(some)) / (1 + k)
    raise AssertionError(f"rank {rank} has {mean}, which is no mean of a stratum and others")


@pytest.mark.parametrize("way", ["reduce-scatter", "sharded"])
def test_each_owner_has_an_unbiased_mean_where_links_lose_alike(
    sharded: list[dict[str, Any]], way: str
) -> None:
    """Of packets to which another rank contributed; by count the same arrivals would be biased."""
    for rank, found in enumerate(sharded):
        assert found["lost"] > 1000
        packets = np.concatenate(found[way])
        known = packets[packets != GIVEN[rank]]
        assert len(known) > 0.9 * len(packets)
        assert standard_errors(known, TRUTH) < STANDARD_ERRORS
        means, where = np.unique(known, return_inverse=True)
        counted = np.array([by_count(rank, mean) for mean in means])[where]
        assert standard_errors(counted, TRUTH) > 2 * STANDARD_ERRORS


def test_weights_are_unbiased_for_sharded_optimizer_where_links_lose_differently(
    sharded: list[dict[str, Any]],
) -> None:
    """With its two rounds of resending, of which the rates are."""
    for rank, found in enumerate(sharded):
        weighted, count = (
            np.mean(found[name], axis=1) for name in ("inverse_probability", "count")
        )
        assert found["lost, inverse_probability"] > 1000
        assert standard_errors(weighted, TRUTH) < STANDARD_ERRORS
        if rank in (1, 2):  # to whom rank 0's seldom come
            assert standard_errors(count, TRUTH) > 2 * STANDARD_ERRORS
