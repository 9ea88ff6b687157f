"""The mean of what arrived is unbiased, through the real engine: many operations on fixed inputs
that differ from rank to rank must average to the truth, within four standard errors, for every
element.

The criterion has power: with owners that are never redrawn, or zeros for what is lost, it must
fail.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from lossycoll.plan import Finish, Missing, Plan, hierarchical, reduce_scatter, ring
from lossycoll.plan.faults import parse
from lossycoll.plan.order import draw_order, segments
from tests.oracle.codec import Array
from tests.support.network import GROUP, Network

WORLD = 4
PAYLOAD = 64
PER_PACKET = PAYLOAD // 4
PACKETS = 8
COUNT = PACKETS * PER_PACKET
OPERATIONS = 1500
IN_FLIGHT = 50
LOSSES = ("loss=0.1", "loss=0.3", "loss=0.5", "loss=0.1,burst=4", "loss=0.3,burst=4",
          "loss=0.5,burst=4")  # fmt: skip
SAMPLE = "loss=0.3,burst=4"
"""The one of the short suite, which has the statistics on the reference besides
(plan/test_reference_executor.py): that the engine equals it is the oracle's to say."""
by_loss = pytest.mark.parametrize(
    "faults",
    [pytest.param(one, marks=() if one == SAMPLE else pytest.mark.long) for one in LOSSES],
)
STANDARD_ERRORS = 4.0
FIXED = tuple(range(WORLD))


@dataclass
class Samples:
    """One number per operation, rank and segment: the mean over the segment's packets.

    Packets of one operation share bursts, owners and (on a ring) partial sums, so an operation is
    one observation; operations are independent.
    """

    reduced: Array
    """The packets that were reduced and that the rank has, each divided by the chance that it gets
    there. Without that a rank has more of its own reductions than of others', since these need no
    network, and leans towards itself however well each was reduced. Of reduce_scatter, NaN where
    no other rank contributed."""
    all: Array
    """What the rank ends up with, own contributions filled in."""


def truth() -> float:
    return float(np.mean([own(rank) for rank in range(WORLD)]))


def own(rank: int) -> float:
    """What rank r gives everywhere; no mean of other ranks' is the same."""
    return float(1 << rank)


def plans_of(algorithm: str, order: tuple[int, ...], missing: Missing) -> list[Plan]:
    if algorithm == "reduce_scatter":
        return [reduce_scatter.reduce_scatter(WORLD, r, COUNT, PER_PACKET) for r in range(WORLD)]
    builder = {"ring": ring.all_reduce, "transpose": hierarchical.all_reduce}[algorithm]
    return [builder(WORLD, r, COUNT, PER_PACKET, order=order, missing=missing) for r in FIXED]


def chances(algorithm: str, order: tuple[int, ...], loss: float) -> Array:
    """(rank, packet): the chance that the reduced packet reaches the rank."""
    chance = np.ones((WORLD, PACKETS))
    for s, (offset, length) in enumerate(segments(COUNT, WORLD, PER_PACKET)):
        packets = slice(offset // PER_PACKET, (offset + length) // PER_PACKET)
        for rank in range(WORLD):
            if algorithm == "ring":
                # Reduced one position before the segment's start; then a hop per position.
                hops = (order.index(rank) - (s - 1)) % WORLD
            else:
                hops = int(algorithm == "transpose" and order[s] != rank)
            chance[rank, packets] = (1 - loss) ** hops
    return chance


def sample(algorithm: str, faults: str, *, redrawn: bool = True, zeros: bool = False) -> Samples:
    """Runs the operations. ``zeros``: what never arrived is 0, as in naive implementations.

    KEEP leaves a mark where nothing arrived, and the own contribution is put there by hand: the
    oracle test proves that this is what OWN does.
    """
    reduced = np.zeros((OPERATIONS, WORLD, WORLD))
    everything = np.zeros((OPERATIONS, WORLD, WORLD))
    mark = np.float32(-1000)
    loss = parse(faults).loss
    with Network(WORLD, PAYLOAD, inject=faults) as network:
        for first in range(0, OPERATIONS, IN_FLIGHT):
            jobs = []
            for op in range(first, first + IN_FLIGHT):
                order = draw_order(17, GROUP, op, WORLD) if redrawn else FIXED
                plans = plans_of(algorithm, order, Missing.KEEP)
                given = [np.full(p.in_elements, own(p.rank), np.float32) for p in plans]
                got = [np.full(p.out_elements, mark, np.float32) for p in plans]
                tickets = [
                    network.submit(r, plans[r], (given[r], got[r]), "f32") for r in range(WORLD)
                ]
                jobs.append((op, chances(algorithm, order, loss), given, got, tickets))
            for op, chance, _given, got, tickets in jobs:
                for rank in range(WORLD):
                    assert network.end(rank, tickets[rank]).code == 0
                    values = got[rank][::PER_PACKET].astype(np.float64)
                    if algorithm == "reduce_scatter":
                        known = np.where(values == own(rank), np.nan, values)
                    else:
                        there = values != mark
                        known = values * there / chance[rank]
                        values[~there] = 0.0 if zeros else own(rank)
                    reduced[op, rank] = known.reshape(WORLD, -1).mean(axis=1)
                    everything[op, rank] = values.reshape(WORLD, -1).mean(axis=1)
        assert sum(engine.stats().packets_injected for engine in network.engines) > 0
    return Samples(reduced, everything)


def distance(samples: Array) -> float:
    """The worst segment's, in standard errors from the truth. ``samples``: (operation, segment)."""
    many = np.count_nonzero(~np.isnan(samples), axis=0)
    error = np.nanstd(samples, axis=0, ddof=1) / np.sqrt(many)
    return float(np.max(np.abs(np.nanmean(samples, axis=0) - truth()) / error))


def seeded(faults: str) -> str:
    return f"{faults},seed=41"


@by_loss
@pytest.mark.parametrize("algorithm", ["ring", "transpose"])
def test_all_reduce_is_unbiased(algorithm: str, faults: str) -> None:
    samples = sample(algorithm, seeded(faults))
    for rank in range(WORLD):
        assert distance(samples.reduced[:, rank]) < STANDARD_ERRORS, f"rank {rank}"
    assert distance(samples.all.mean(axis=1)) < STANDARD_ERRORS


@by_loss
def test_reduce_scatter_is_unbiased_where_anything_arrived(faults: str) -> None:
    """When nothing did, a rank has its own only, and the report says so; ranks even out."""
    samples = sample("reduce_scatter", seeded(faults))
    for rank in range(WORLD):
        assert distance(samples.reduced[:, rank]) < STANDARD_ERRORS, f"rank {rank}"
    assert distance(samples.all.mean(axis=1)) < STANDARD_ERRORS


@pytest.mark.parametrize("algorithm", [pytest.param("ring", marks=pytest.mark.long), "transpose"])
def test_owners_that_are_never_redrawn_are_found_out(algorithm: str) -> None:
    """An owner's own contribution always counts, so its segments lean towards it."""
    samples = sample(algorithm, "loss=0.3,seed=41", redrawn=False)
    for rank in range(WORLD):
        assert distance(samples.reduced[:, rank]) > STANDARD_ERRORS


def test_zeros_are_found_out() -> None:
    samples = sample("transpose", "loss=0.1,seed=41", zeros=True)
    assert distance(samples.all.mean(axis=1)) > STANDARD_ERRORS


# ---- links that lose differently: what ranks end with leans to those that miss more ----


def test_the_mean_over_ranks_leans_to_those_that_miss_more_as_theory_says() -> None:
    """With the weights of the links, by which owners' reductions are unbiased
    (benchmarks/test_theory.py)."""
    loss = np.full((WORLD, WORLD), 0.1)  # (receiver, sender)
    loss[3] = 0.6
    np.fill_diagonal(loss, 0.0)
    faults = "loss=0.1,link=0-3:0.6,link=1-3:0.6,link=2-3:0.6,seed=41"
    means = []
    with Network(WORLD, PAYLOAD, inject=faults) as network:
        for op in range(400):
            order = draw_order(17, GROUP, op, WORLD)
            got = [np.full(COUNT, own(rank), np.float32) for rank in range(WORLD)]
            tickets = []
            for rank, out in enumerate(got):
                plan = hierarchical.all_reduce(
                    *(WORLD, rank, COUNT, PER_PACKET),
                    order=order,
                    missing=Missing.OWN,
                    finish=Finish.WEIGHTED,
                )
                how = {"weights": 1 / (1 - loss), "divisor": float(WORLD)}
                tickets.append(network.submit(rank, plan, (out, out), "f32", **how))
            for rank, ticket in enumerate(tickets):
                assert network.end(rank, ticket).code == 0
            means.append(np.mean(got, dtype=np.float64))
        assert sum(engine.stats().packets_injected for engine in network.engines) > 1000
    missed = loss.mean(axis=1)
    given = np.array([own(rank) for rank in range(WORLD)])
    leaning = np.mean(missed * (given - truth()))
    error = np.std(means, ddof=1) / len(means) ** 0.5
    assert abs(np.mean(means) - truth() - leaning) < STANDARD_ERRORS * error
    assert leaning > 2 * STANDARD_ERRORS * error
