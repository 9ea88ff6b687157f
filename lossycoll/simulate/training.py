"""Time of training steps, by the engine itself in virtual time (docs/simulate.md).

A rank computes for a while that is given, and submits what a method of training submits, when it
does. Then :mod:`.hosts` says when that has ended. Nothing is computed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..lab.network import Network
from ..options.fields import Options
from ..runtime.world.failure_detector import SILENT_SHARE
from .collective import Load, grain_of, topology_of
from .hosts import MOST_KNOWN, Hosts, missing_of

METHODS: Final = ("plain", "drift_bound", "sharded")
PERIOD: Final = 16
"""Slices of the parameters that DriftBound sends, one after each step: its own default."""
LEAST_SLICE: Final = 4096
"""Bytes."""


class Part(NamedTuple):
    """A collective of a step: ``after``: seconds from the step's begin to where it is submitted."""

    after: float
    collective: str
    nbytes: int


@dataclass(frozen=True)
class Step:
    """One step of all ranks."""

    seconds: float  # from the end of the last rank's step before to the end of the last rank's
    computing: float  # for which the slowest rank computed
    missing: float  # share of the packets of gradients that was given up
    dropped: float  # share of micro-batches that a threshold dropped
    bytes: int  # that left hosts


@dataclass(frozen=True)
class Trained:
    """Some steps in a row; the first ``settled`` don't count."""

    steps: tuple[Step, ...]
    settled: int

    @property
    def steady(self) -> tuple[Step, ...]:
        return self.steps[self.settled :]

    @property
    def seconds(self) -> float:
        return statistics.median(step.seconds for step in self.steady)

    @property
    def seconds_p99(self) -> float:
        return float(np.quantile([step.seconds for step in self.steady], 0.99))

    @property
    def computing(self) -> float:
        return statistics.median(step.computing for step in self.steady)

    @property
    def missing(self) -> float:
        return statistics.fmean(step.missing for step in self.steady)

    @property
    def bound(self) -> str:
        """The larger part of a step: network or computing."""
        exposed = self.seconds - self.computing
        return "network" if exposed > self.computing else "computing"


def buckets_of(nbytes: int, most: int) -> tuple[int, ...]:
    """Bytes of each bucket of so many bytes of gradients, in the order in which they are ready."""
    first = min(nbytes, 1 << 20, most)  # as DDP's, so the last layers' gradients go first
    rest = nbytes - first
    whole, last = divmod(rest, most)
    return (first, *[most] * whole, *([last] if last else []))


def simulate_training(
    network: Network,
    buckets: Sequence[int],
    times: NDArray[np.float64],
    *,
    hosts: int | None = None,
    ranks_per_host: int = 1,
    options: Options | None = None,
    method: str = "plain",
    threshold: float | None = None,
    death: int | None = None,
    settle: int = 2,
) -> Trained:
    """Simulates steps of training, whose collectives are those of ``method``.

    ``times`` are seconds of micro-batches, by step, rank and micro-batch. ``buckets`` are bytes of
    gradients in float32, submitted as the last micro-batch's backward pass goes on. With a
    ``threshold`` a rank that has computed for so long begins no further micro-batch, and gradients
    are submitted when it has ended, since no rank knows before which one is its last. The last host
    dies as step ``death`` begins, with all its ranks: nobody hears that their processes have ended.
    """
    topology = topology_of(network, hosts, ranks_per_host, None)
    steps, ranks, _ = times.shape
    if method not in METHODS:
        raise OptionError(f"no method {method!r}; there are {', '.join(METHODS)}")
    if ranks != topology.world or topology.world > MOST_KNOWN:
        raise OptionError(
            f"times of {ranks} ranks for {topology.world}; wanted the same, {MOST_KNOWN} at most"
        )
    if not 0 <= settle < steps or not buckets or min(buckets) < 4 * topology.world:
        raise OptionError(
            f"{steps} steps of which {settle} don't count, with buckets {list(buckets)}; wanted "
            f"steps that count, and {4 * topology.world} bytes or more in each bucket"
        )
    options = options or Options()
    left = ranks - ranks_per_host
    if death is not None and not (options.continues and left > 1 and 0 <= death < steps):
        raise OptionError(
            f"a host dies in step {death} of {steps}, which leaves {left} of {ranks} ranks, with "
            f"on_peer_loss {options.on_peer_loss!r}; wanted a step that there is, 2 ranks or more "
            f"that are left, 'continue'"
        )
    done: list[Step] = []
    load = Load(options, max(sum(buckets), LEAST_SLICE), topology.world)
    with Hosts(network, topology, options, grain=grain_of(network)) as world:
        begun = [world.now] * ranks
        for number, of_all in enumerate(times):
            of_step = of_all if death is None or number < death else of_all[:left]
            mine = [of_rank[: _computed(of_rank, threshold)] for of_rank in of_step]
            parts = [[*_parts(method, buckets, one, threshold is not None)] for one in mine]
            dead = range(left, ranks) if number == death else range(0)
            last, before = max(begun), world.counts().bytes
            begun, missing = _run(world, load, parts, begun, dead)
            seconds, computing = max(begun) - last, max(float(one.sum()) for one in mine)
            dropped, sent = 1 - sum(map(len, mine)) / of_step.size, world.counts().bytes - before
            done.append(Step(seconds, computing, missing, dropped, sent))
    return Trained(tuple(done), settle)


def _computed(mine: NDArray[np.float64], threshold: float | None) -> int:
    if threshold is None:
        return len(mine)
    before = np.cumsum(mine) - mine
    return max(1, int((before < threshold).sum()))


def _parts(
    method: str, buckets: Sequence[int], mine: NDArray[np.float64], at_end: bool
) -> Iterator[Part]:
    end = float(mine.sum())
    # A backward pass takes twice as long as a forward pass.
    backward = 0.0 if at_end else float(mine[-1]) * 2 / 3
    total, ready = sum(buckets), 0
    gradients = "reduce_scatter" if method == "sharded" else "all_reduce"
    for nbytes in buckets:
        ready += nbytes
        yield Part(end - backward * (1 - ready / total), gradients, nbytes)
    if method == "sharded":  # the optimizer steps on what has come, and sends parameters
        for nbytes in buckets:
            yield Part(end, "all_gather", nbytes)
    if method == "drift_bound":
        yield Part(end, "all_gather", max(total // PERIOD, LEAST_SLICE))


def _run(
    world: Hosts,
    load: Load,
    parts: Sequence[Sequence[Part]],
    begun: Sequence[float],
    dead: Sequence[int],
) -> tuple[list[float], float]:
    """When each rank has ended a step, and the share of its gradients' packets that is missing.
    ``dead``: the ranks that die as it begins, behind those of ``parts``."""
    for rank in dead:
        world.kill(rank)
    given_up = world.now + SILENT_SHARE * load.options.liveness
    ranks = range(len(parts))
    due = sorted(
        (begun[rank] + part.after, number, rank)
        for rank in ranks
        for number, part in enumerate(parts[rank])
    )
    for when, number, rank in due:
        if when > world.now:
            world.run(when)
        _, collective, nbytes = parts[rank][number]
        world.submit(rank, partial(load.submit, name=collective, nbytes=nbytes))
    if dead:
        world.run(max(given_up, world.now))
        world.give_up(dead, ranks)
    ends, code, of_all = world.finish(len(parts))
    if code:
        raise OptionError(f"a step failed with code {int(code)} ({code.name.lower()})")
    of_gradients = [
        report
        for (_, number, rank), report in zip(due, of_all, strict=True)
        if parts[rank][number].collective != "all_gather"
    ]
    return ends, missing_of(of_gradients)
