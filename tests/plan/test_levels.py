"""Slots that feed slots: what the reference makes of plans of levels, and what their means are
worth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import sqrt

import numpy as np
import pytest
from numpy.typing import NDArray

from lossycoll.plan import Combine, Delivery, Finish, Level, Missing, Own, Plan, Target, draw_order
from lossycoll.plan.faults import Inject
from tests.oracle.masks import lost
from tests.oracle.reference_executor import RankResult, execute
from tests.support import two_levels
from tests.support.two_levels import Hosts, Topology

RELIABLE, LOSSY = Delivery(reliable=True), Delivery()
UNEQUAL: Hosts = ((0, 1, 2), (3,), (4, 5))
EQUAL: Hosts = ((0, 1), (2, 3), (4, 5))
WORLD = 6
LOSS = 0.4
PACKETS = 16
OPERATIONS = 100


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    "hosts", [((0,),), ((0, 1),), ((0,), (1,)), ((0, 1), (2,)), ((3, 0), (1, 2)), UNEQUAL]
)
def test_without_loss_it_is_the_mean_of_all(hosts: Hosts, times: int) -> None:
    world = sum(len(host) for host in hosts)
    for count in (0, 1, 7, 100):
        order = draw_order(3, 1, count, world)
        build = partial(two_levels.all_reduce, Topology(hosts, RELIABLE, times))
        plans = [build(world, rank, count, 6, order=order) for rank in range(world)]
        rng = np.random.default_rng(count)
        data = [rng.integers(-8, 9, count).astype(np.float64) for _ in range(world)]
        mean = np.mean(data, axis=0) if count else np.zeros(0)
        found = execute(plans, data, data, "f64", 1.0, partial(lost, Inject(), 1, 1), 0)
        for rank in range(world):
            np.testing.assert_allclose(data[rank], mean, rtol=1e-12)
            assert found[rank].packets_missing == 0
        assert sum(r.contributions for r in found) == world * sum(
            r.contribution_packets for r in found
        ), "a mean has the weight of all"


def reduced(
    hosts: Hosts, within: Delivery, op: int, finish: Finish = Finish.MEAN
) -> NDArray[np.float64]:
    """What each rank forms of the packets that it owns, on average; shape (WORLD,). Rank r gives
    2**r everywhere."""
    order = draw_order(5, 2, op, WORLD)
    count = WORLD * PACKETS
    plans = [
        two_levels.all_reduce(
            Topology(hosts, within), WORLD, r, count, 1, order=order, finish=finish
        )
        for r in range(WORLD)
    ]
    data = [np.full(count, 2.0**r) for r in range(WORLD)]
    weighing = {}
    if finish == Finish.WEIGHTED:
        home = {rank: host for host in hosts for rank in host}
        same = np.array([[home[a] is home[b] for b in range(WORLD)] for a in range(WORLD)])
        rate = np.where(same, 1.0 if within.reliable else 1 - LOSS, 1 - LOSS)
        weighing = {"weights": 1 / rate, "divisor": float(WORLD)}
    faults = partial(lost, Inject(loss=LOSS, seed=7), 2, op)
    execute(plans, data, data, "f64", 1.0, faults, 0, **weighing)
    own = [order.index(rank) * PACKETS for rank in range(WORLD)]
    return np.array([data[r][own[r] : own[r] + PACKETS].mean() for r in range(WORLD)])


def errors(samples: NDArray[np.float64], chance: NDArray[np.float64] | None = None) -> float:
    """How far their mean is from the truth, in standard errors; ``chance``: of each owner."""
    one = np.average(samples, axis=1, weights=chance)
    truth = float(np.mean(2.0 ** np.arange(WORLD)))
    return float(abs(one.mean() - truth) / (one.std(ddof=1) / sqrt(len(one))))


def sampled(hosts: Hosts, within: Delivery, finish: Finish = Finish.MEAN) -> NDArray[np.float64]:
    return np.array([reduced(hosts, within, op, finish) for op in range(OPERATIONS)])


def by_host(hosts: Hosts) -> NDArray[np.float64]:
    """The chance of each owner if hosts were drawn, not ranks."""
    sizes = {rank: len(host) for host in hosts for rank in host}
    return np.array([1 / sizes[rank] for rank in range(WORLD)])


def subsets(ranks: tuple[int, ...], loss: float) -> Iterator[tuple[frozenset[int], float]]:
    """Those of them whose packets arrive, each with its chance."""
    for bits in product((False, True), repeat=len(ranks)):
        there = frozenset(r for r, bit in zip(ranks, bits, strict=True) if bit)
        yield there, (1 - loss) ** len(there) * loss ** (len(ranks) - len(there))


def partial_sums(host: tuple[int, ...], loss: float) -> list[tuple[frozenset[int], float]]:
    """The ranks in a host's partial sum, over all ranks that may gather it, with their chances."""
    return [
        (there | {at}, chance / len(host))
        for at in host
        for there, chance in subsets(tuple(r for r in host if r != at), loss)
    ]


def shares(hosts: Hosts, within: float, between: float) -> NDArray[np.float64]:
    """Each rank's expected share of the mean, over all outcomes for one packet; 1/N: unbiased."""
    found = np.zeros(sum(len(host) for host in hosts))
    for i, home in enumerate(hosts):
        others = tuple(j for j in range(len(hosts)) if j != i)
        for came, chance in subsets(others, between):
            sums = [partial_sums(hosts[j], within) for j in (i, *sorted(came))]
            for outcome in product(*sums):
                arrived = frozenset().union(*(ranks for ranks, _ in outcome))
                p = chance * len(home) / len(found) * float(np.prod([p for _, p in outcome]))
                found[list(arrived)] += p / len(arrived)
    return found


@pytest.mark.parametrize("between", [0.1, 0.6])
def test_each_rank_has_its_share_exactly(between: float) -> None:
    even = np.full(WORLD, 1 / WORLD)
    np.testing.assert_allclose(shares(UNEQUAL, 0.0, between), even, rtol=1e-12)
    np.testing.assert_allclose(shares(EQUAL, 0.3, between), even, rtol=1e-12)
    uneven = shares(UNEQUAL, 0.3, between)
    assert uneven.sum() == pytest.approx(1)
    assert 0.1 < np.abs(uneven / even - 1).max() < 0.25, "docs/theory.md says how much it is"


def test_the_mean_of_partial_sums_is_unbiased() -> None:
    samples = sampled(UNEQUAL, RELIABLE)
    assert errors(samples) < 4
    assert errors(samples, by_host(UNEQUAL)) > 6, "owners drawn by host would have to be biased"
    fixed = np.eye(WORLD)[0]
    assert errors(samples, fixed) > 6, "a fixed owner would have to be biased"


def test_it_is_unbiased_with_loss_within_hosts_of_one_size() -> None:
    samples = sampled(EQUAL, LOSSY)
    assert errors(samples) < 4
    assert errors(samples, np.eye(WORLD)[0]) > 6


def test_weighted_sums_are_unbiased_on_two_levels() -> None:
    assert errors(sampled(UNEQUAL, LOSSY, Finish.WEIGHTED)) < 4


def changed(**fields: object) -> list[Plan]:
    """The plans of four ranks on two hosts, of which rank 0's fed slot is another."""
    topology = Topology(((0, 1), (2, 3)), RELIABLE, 2)
    plans = [two_levels.all_reduce(topology, 4, r, 80, 8, order=(2, 3, 0, 1)) for r in range(4)]
    slots = list(plans[0].slots)
    at = next(i for i, slot in enumerate(slots) if slot.own == Own.SLOT)
    slots[at] = replace(slots[at], **fields)  # type: ignore[arg-type]
    plans[0] = replace(plans[0], slots=tuple(slots))
    return [replace(plan, levels=(*plan.levels, Level(3))) for plan in plans]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"feed": 400}, "stands before it"),
        ({"feed": 4}, "stands before it"),
        ({"own_offset": 80}, "no more than its"),
        ({"level": 3}, "cuts"),
        ({"combine": Combine.ADD}, "a sum, or a copy that is stored nowhere"),
        ({"target": Target.OUT}, "a sum, or a copy that is stored nowhere"),
    ],
)
def test_feeds_that_do_not_fit_are_refused(fields: dict[str, object], message: str) -> None:
    plans = changed(**fields)
    data = [np.zeros(80) for _ in range(4)]
    with pytest.raises(ValueError, match=message):
        execute(plans, data, data, "f64", 1.0, partial(lost, Inject(), 1, 1), 0)


def test_levels_must_agree() -> None:
    plans = changed()
    data = [np.zeros(80) for _ in range(4)]
    run = partial(execute, plans, data, data, "f64", 1.0, partial(lost, Inject(), 1, 1), 0)
    results: list[RankResult] = run()
    assert all(r.packets_missing == 0 for r in results)
    slots = [
        replace(slot, level=0) if slot.level == 2 and slot.sources else slot
        for slot in plans[1].slots
    ]
    plans[1] = replace(plans[1], slots=tuple(slots))
    with pytest.raises(ValueError, match="is of level 2, wanted the receiver's 0"):
        run()
    plans[1] = replace(plans[1], levels=())
    with pytest.raises(ValueError, match="signatures differ"):
        run()


def test_a_copy_of_nothing_leaves_what_was_there() -> None:
    """Everything between hosts is lost: each host has the mean of its own ranks, or its own."""
    topology = Topology(((0, 1), (2, 3)), RELIABLE)
    plans = [two_levels.all_reduce(topology, 4, r, 40, 5, missing=Missing.KEEP) for r in range(4)]
    data = [np.full(40, 2.0**r) for r in range(4)]
    found = execute(plans, data, data, "f64", 1.0, partial(lost, Inject(loss=1.0), 1, 1), 0)
    for host in topology.hosts:
        mean = np.mean([2.0**r for r in host])
        for rank in host:
            own = (data[rank] == mean) | (data[rank] == 2.0**rank)
            assert own.all()
            assert (data[rank] == mean).sum() == 20
            assert found[rank].kept == 4
