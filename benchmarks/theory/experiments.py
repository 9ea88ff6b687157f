"""The theory's experiments, each by either executor: engines joined by sockets, or the reference.

An experiment takes sizes, a loss and a seed, and returns samples; tests/benchmarks/test_theory.py
judges small ones, benchmarks/theory/__main__.py draws large ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from lossycoll.plan import (
    Finish,
    Missing,
    Plan,
    hierarchical,
    leave_out,
    reduce_scatter,
    rename,
    ring,
)
from lossycoll.plan.copies import all_gather
from lossycoll.plan.faults import Inject, parse
from lossycoll.plan.order import draw_order, segments
from tests.oracle.codec import Array
from tests.oracle.masks import lost
from tests.oracle.reference_executor import execute
from tests.support.network import GROUP, Network

PAYLOAD = 64
PER_PACKET = PAYLOAD // 4
IN_FLIGHT = 50
EXECUTORS = ("sockets", "reference")


@dataclass(frozen=True)
class Job:
    """One collective of the ranks that are left, in ascending order."""

    plans: Sequence[Plan]
    given: Sequence[Array]
    got: Sequence[Array]


class Executor(Protocol):
    """Runs jobs in order; ``weights``: (receiver, sender)."""

    def run(self, jobs: Sequence[Job], weights: Array | None = None) -> None: ...


class Sockets:
    """Engines in this process. ``dead``: a rank that is closed, and that the others gave up."""

    def __init__(self, network: Network, dead: int | None) -> None:
        self._network = network
        self._left = [rank for rank in range(network.world) if rank != dead]
        if dead is not None:
            network.engines[dead].close()
            for rank in self._left:
                network.engines[rank].peer_dead(dead)

    def run(self, jobs: Sequence[Job], weights: Array | None = None) -> None:
        left, network = self._left, self._network
        for begin in range(0, len(jobs), IN_FLIGHT):
            some = jobs[begin : begin + IN_FLIGHT]
            tickets = [
                network.submit(
                    rank,
                    job.plans[i],
                    (job.given[i], job.got[i]),
                    "f32",
                    weights=weights,
                    divisor=float(len(left)),
                )
                for job in some
                for i, rank in enumerate(left)
            ]
            for number, ticket in enumerate(tickets):
                ended = network.end(left[number % len(left)], ticket)
                assert ended.code == 0, ended.failure

    @property
    def injected(self) -> int:
        return sum(self._network.engines[rank].stats().packets_injected for rank in self._left)


class Table:
    """The reference, with the same packets lost. A dead rank is one that its plans don't have, and
    the others' links keep their names."""

    def __init__(self, world: int, faults: Inject, dead: int | None) -> None:
        self._faults = faults
        self._left = [rank for rank in range(world) if rank != dead]
        self._op = 0
        self.injected = 0

    def run(self, jobs: Sequence[Job], weights: Array | None = None) -> None:
        among = None if weights is None else weights[np.ix_(self._left, self._left)]
        for job in jobs:
            execute(job.plans, job.given, job.got, "f32", 1.0, self._lost, 0, weights=among)
            self._op += 1

    def _lost(self, sender: int, receiver: int, slot: int, packets: int, round: int) -> Array:
        ends = self._left[sender], self._left[receiver]
        gone = lost(self._faults, GROUP, self._op, *ends, slot, packets, round)
        self.injected += int(gone.sum())
        return gone


@contextmanager
def executing(
    executor: str, world: int, faults: str, dead: int | None = None
) -> Iterator[Sockets | Table]:
    """An executor by name; on leaving, faults must have happened."""
    if executor == "reference":
        table = Table(world, parse(faults), dead)
        yield table
        assert table.injected > 0
        return
    with Network(world, PAYLOAD, inject=faults, reorder_min=2e-4) as network:
        sockets = Sockets(network, dead)
        yield sockets
        assert sockets.injected > 0


# ---- reductions ----


def own(rank: int) -> float:
    """What a rank gives; no mean of some ranks' is that of others."""
    return float(1 << rank)


def plans(
    algorithm: str,
    executor: str,
    world: int,
    packets: int,
    order: tuple[int, ...],
    dead: int | None,
    finish: Finish | None,
) -> list[Plan]:
    """Of the ranks that are left, which ``order`` permutes by their place among those."""
    left = [rank for rank in range(world) if rank != dead]
    count, n = packets * PER_PACKET, len(left)
    if algorithm == "reduce_scatter":
        way = Finish.STRATIFIED if finish is None else finish
        if executor == "reference":
            return [
                reduce_scatter.reduce_scatter(n, i, count, PER_PACKET, finish=way) for i in range(n)
            ]
        whole = [
            reduce_scatter.reduce_scatter(world, r, count, PER_PACKET, finish=way) for r in left
        ]
        return whole if dead is None else [leave_out(plan, left) for plan in whole]
    build = {"ring": ring.all_reduce, "transpose": hierarchical.all_reduce}[algorithm]
    way = Finish.MEAN if finish is None else finish
    made = [
        build(n, i, count, PER_PACKET, order=order, missing=Missing.KEEP, finish=way)
        for i in range(n)
    ]
    if dead is None or executor == "reference":
        return made
    return [rename(plan, left, world) for plan in made]


def chances(
    algorithm: str, left: Sequence[int], packets: int, order: tuple[int, ...], f: Inject
) -> Array:
    """(rank, packet): the chance that the reduced packet reaches the rank."""
    n = len(left)
    chance = np.ones((n, packets))
    if algorithm == "reduce_scatter":
        return chance
    for s, (offset, length) in enumerate(segments(packets * PER_PACKET, n, PER_PACKET)):
        there = slice(offset // PER_PACKET, (offset + length) // PER_PACKET)
        for rank in range(n):
            if algorithm == "transpose":
                way = [order[s], rank] if order[s] != rank else []
            else:  # reduced one position before the segment's start; then from hand to hand
                hops = (order.index(rank) - (s - 1)) % n
                way = [order[(s - 1 + hop) % n] for hop in range(hops + 1)]
            for sender, receiver in pairwise(way):
                chance[rank, there] *= 1 - f.loss_of(left[sender], left[receiver])
    return chance


def means(
    executor: str,
    algorithm: str,
    faults: str,
    operations: int,
    *,
    world: int = 4,
    dead: int | None = None,
    finish: Finish | None = None,
    redrawn: bool = True,
) -> Array:
    """Of each operation, rank that is left, and segment: the mean over the packets that the rank
    has of those that were reduced, each divided by the chance that it gets there.

    Packets of one operation may share bursts, so an operation is one observation. ``finish``
    WEIGHTED has the weights 1 / (1 - loss) of each link. reduce_scatter leaves a rank one segment;
    by count, packets of it that no other rank contributed to are left out (NaN if none is left).
    """
    f = parse(faults)
    left = [rank for rank in range(world) if rank != dead]
    n, mark = len(left), np.float32(-1000)
    packets = 2 * n
    cut = 1 if algorithm == "reduce_scatter" else n
    weights = None
    if finish == Finish.WEIGHTED:
        weights = np.array(
            [[1.0 if i == j else 1 / (1 - f.loss_of(j, i)) for j in range(world)]
             for i in range(world)]
        )  # fmt: skip
    samples = np.zeros((operations, n, cut))
    with executing(executor, world, faults, dead) as at:
        for begin in range(0, operations, IN_FLIGHT):
            jobs, chance = [], []
            for op in range(begin, min(operations, begin + IN_FLIGHT)):
                order = draw_order(17, GROUP, op, n) if redrawn else tuple(range(n))
                made = plans(algorithm, executor, world, packets, order, dead, finish)
                given = [
                    np.full(plan.in_elements, own(left[i]), np.float32)
                    for i, plan in enumerate(made)
                ]
                got = [np.full(plan.out_elements, mark, np.float32) for plan in made]
                jobs.append(Job(made, given, got))
                chance.append(chances(algorithm, left, packets, order, f))
            at.run(jobs, weights)
            for number, (job, reach) in enumerate(zip(jobs, chance, strict=True)):
                for i, held in enumerate(job.got):
                    values = held[::PER_PACKET].astype(np.float64)
                    if algorithm == "reduce_scatter":
                        alone = weights is None and n > 1
                        known = values[values != own(left[i])] if alone else values
                    else:
                        known = values * (values != mark) / reach[i]
                    here = known.reshape(cut, -1).mean(axis=1) if len(known) else np.nan
                    samples[begin + number, i] = here
    return samples


def truth(world: int, dead: int | None = None) -> float:
    return float(np.mean([own(rank) for rank in range(world) if rank != dead]))


def standard_errors(samples: Array, true: float) -> float:
    """The worst segment's distance from ``true``, in standard errors; ``samples``: of means()."""
    many = np.count_nonzero(~np.isnan(samples), axis=0)
    error = np.nanstd(samples, axis=0, ddof=1) / np.sqrt(many)
    return float(np.max(np.abs(np.nanmean(samples, axis=0) - true) / error))


def variance(
    executor: str,
    world: int,
    loss: float,
    operations: int,
    *,
    mean: float = 0.0,
    finish: Finish | None = None,
    algorithm: str = "transpose",
    seed: int = 1,
) -> float:
    """Mean square distance from ``mean`` of what owners reduce from N(mean, 1), over that of the
    lossless mean of the same contributions. ``finish`` and reduce_scatter as for :func:`means`:
    packets to which no other rank contributed are left out."""
    rng = np.random.default_rng(seed)
    packets = 4 * world
    weights = None
    if finish == Finish.WEIGHTED:
        weights = np.full((world, world), 1 / (1 - loss))
        np.fill_diagonal(weights, 1.0)
    cut = segments(packets * PER_PACKET, world, PER_PACKET)
    scattered = algorithm == "reduce_scatter"
    square, lossless = 0.0, 0.0
    with executing(executor, world, f"loss={loss},seed={seed}") as at:
        for begin in range(0, operations, IN_FLIGHT):
            jobs, noises = [], []
            orders = [
                tuple(range(world)) if scattered else draw_order(5, GROUP, op, world)
                for op in range(begin, begin + IN_FLIGHT)
            ]
            for order in orders:
                per_plan = packets // world if scattered else packets
                made = plans(algorithm, executor, world, per_plan, order, None, finish)
                noises.append(rng.standard_normal((world, packets * PER_PACKET)))
                data = list((mean + noises[-1]).astype(np.float32))
                got = [
                    row[: plan.out_elements].copy() for row, plan in zip(data, made, strict=True)
                ]
                jobs.append(Job(made, data, got))
            at.run(jobs, weights)
            for order, job, noise in zip(orders, jobs, noises, strict=True):
                for owner, (offset, length) in zip(order, cut, strict=True):
                    there = slice(offset, offset + length)
                    reduced = job.got[owner] if scattered else job.got[owner][there]
                    alone = scattered and weights is None
                    known = reduced != job.given[owner][there] if alone else slice(None)
                    square += float(np.square(reduced[known].astype(np.float64) - mean).sum())
                    lossless += float(np.square(noise[:, there].mean(axis=0)[known]).sum())
    return square / lossless


# ---- parameters that are broadcast ----


@dataclass(frozen=True)
class Broadcast:
    """Of parameters that owners move and broadcast at each step, after ``WARM_UP_STEPS``."""

    drift: float
    """Mean square distance of two receivers, per element."""
    from_owner: float
    """The same of the owner and a receiver."""
    ages: Array
    """How often a receiver's packet was 0, 1, 2, ... steps old."""


WARM_UP_STEPS = 60
OLDEST = 64


def broadcast(
    executor: str,
    loss: float,
    steps: int,
    *,
    mean: float = 0.0,
    world: int = 3,
    packets: int = 40,
    seed: int = 2,
) -> Broadcast:
    """Every rank owns a chunk, moves it by ``mean`` + N(0, 1) at each step, and sends it to all by
    a lossy all-gather into a buffer that outlives the step: what is lost leaves what was there.

    The first element of a packet says when it was sent.
    """
    rng = np.random.default_rng(seed)
    count = packets * PER_PACKET
    made = [all_gather(world, rank, count, PER_PACKET) for rank in range(world)]
    values = np.zeros((world, packets, PER_PACKET))
    held = [np.zeros(world * count, np.float32) for _ in range(world)]
    far, off, pairs, seen = 0.0, 0.0, 0, 0
    ages = np.zeros(OLDEST, np.int64)
    with executing(executor, world, f"loss={loss},seed={seed}") as at:
        for step in range(steps):
            values += mean + rng.standard_normal(values.shape)
            values[:, :, 0] = step
            given = [values[rank].astype(np.float32).ravel() for rank in range(world)]
            at.run([Job(made, given, held)])
            if step < WARM_UP_STEPS:
                continue
            have = np.stack(held).astype(np.float64).reshape(world, world, packets, PER_PACKET)
            for owner in range(world):
                others = [rank for rank in range(world) if rank != owner]
                for rank in others:
                    age = step - have[rank, owner, :, 0].astype(np.int64)
                    ages += np.bincount(np.minimum(age, OLDEST - 1), minlength=OLDEST)
                    away = have[rank, owner, :, 1:] - given[owner].reshape(packets, -1)[:, 1:]
                    off += float(np.square(away).mean())
                    seen += 1
                for i, a in enumerate(others):
                    for b in others[i + 1 :]:
                        apart = have[a, owner, :, 1:] - have[b, owner, :, 1:]
                        far += float(np.square(apart).mean())
                        pairs += 1
    return Broadcast(far / pairs, off / seen, ages)


def bursts(
    executor: str, loss: float, burst: float, operations: int, *, steps: int = 2000, seed: int = 3
) -> float:
    """Mean square distance of two receivers where a receiver's losses come in runs of steps.

    Bursts are injected along the packets of one stream. So time runs along the stream: packet k is
    the owner's value after k steps, and a receiver that misses it keeps that of the last one that
    came, which is done here and not by the executor. A packet is one of 16 values.
    """
    rng = np.random.default_rng(seed)
    world, far, pairs = 3, 0.0, 0
    made = [all_gather(world, rank, steps * PER_PACKET, PER_PACKET) for rank in range(world)]
    with executing(executor, world, f"loss={loss},burst={burst},seed={seed}") as at:
        for _ in range(operations):
            walk = rng.standard_normal((world, steps, PER_PACKET)).cumsum(axis=1)
            given = [row.astype(np.float32).ravel() for row in walk]
            got = [np.full(world * steps * PER_PACKET, np.nan, np.float32) for _ in range(world)]
            at.run([Job(made, given, got)])
            for owner in range(world):
                have = [
                    _kept(got[rank].reshape(world, steps, PER_PACKET)[owner])
                    for rank in range(world)
                    if rank != owner
                ]
                apart = (have[0] - have[1])[int(10 * burst) :]
                far += float(np.square(apart).mean())
                pairs += 1
    return far / pairs


def _kept(values: Array) -> Array:
    """(step, element): NaN replaced by what was there a step before, 0 at the beginning."""
    there = ~np.isnan(values[:, 0])
    last = np.maximum.accumulate(np.where(there, np.arange(len(values)), -1))
    wide = values.astype(np.float64)
    return np.where((last >= 0)[:, None], wide[last], 0.0)


# ---- gradients that are reduced: the reference's version; real ranks are in
# benchmarks/theory/ranks.py ----


@dataclass(frozen=True)
class Steps:
    """Mean square distance of two replicas per element, at ``at``: free, and with DriftBound."""

    at: list[int]
    free: list[float]
    bound: list[float]


def steps_in_reference(
    loss: float, steps: int, period: int, every: int, *, world: int, packets: int
) -> Steps:
    """Replicas that step by means of N(0, 1) as they arrive. DriftBound's slices and owners are its
    own (lossycoll.train.drift.slices); that it does so is what benchmarks/theory/ranks.py
    shows."""
    from lossycoll.train.drift.slices import slice_owner, slice_up

    rng = np.random.default_rng(7)
    faults = parse(f"loss={loss},seed=9")
    count = packets * PER_PACKET
    slices = slice_up([(count, 4)], period, world)
    chunk = slices.chunk_bytes // 4
    gathers = [all_gather(world, rank, chunk, PER_PACKET) for rank in range(world)]
    free = np.zeros((world, count))
    bound = np.zeros((world, count))
    sent: list[tuple[slice, Array]] = []
    """After the last step, with the values of it at each rank."""
    out = Steps([], [], [])

    def lost_of(op: int) -> Callable[[int, int, int, int, int], Array]:
        return lambda *stream: lost(faults, GROUP, op, *stream)

    @functools.cache
    def reductions(order: tuple[int, ...]) -> list[Plan]:
        return [
            hierarchical.all_reduce(world, r, count, PER_PACKET, order=order) for r in range(world)
        ]

    for step in range(steps):
        made = reductions(tuple(draw_order(5, GROUP, step, world)))
        data = rng.standard_normal((world, count)).astype(np.float32)
        means = [row.copy() for row in data]
        execute(made, means, means, "f32", 1.0, lost_of(2 * step), 0)
        free += means
        for here, row in sent:
            bound[:, here] = row
        bound += means
        sweep, number = divmod(step, period)
        staged = np.zeros((world, world * chunk), np.float32)
        places = []
        for c, pieces in enumerate(slices.of(number)):
            by = slice_owner(number, c, sweep, world)
            for piece in pieces:
                at = by * chunk + piece.at // 4
                places.append(
                    (
                        slice(piece.begin, piece.end),
                        slice(at, at + piece.end - piece.begin),
                    )
                )
        for here, there in places:
            staged[:, there] = bound[:, here]
        own_chunks = [staged[r, r * chunk : (r + 1) * chunk].copy() for r in range(world)]
        execute(gathers, own_chunks, list(staged), "f32", 1.0, lost_of(2 * step + 1), 0)
        sent = [(here, staged[:, there]) for here, there in places]
        if (step + 1) % every == 0:
            out.at.append(step + 1)
            out.free.append(distance(free))
            out.bound.append(distance(bound))
    return out


def distance(replicas: Array) -> float:
    """Mean over pairs of the squared distance, per element."""
    off = replicas - replicas.mean(axis=0)
    return float(2 / (len(replicas) - 1) * np.square(off).sum() / replicas.shape[1])
