"""What the theory predicts, as formulas. docs/theory.md says where each comes from.

``p``: the share of packets lost, each on its own; ``world``: ranks. Distances are squared.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import comb


def mean_inverse_count(p: float, world: int) -> float:
    """E[1/R] of R = 1 + Binomial(world - 1, 1 - p) contributions to a packet."""
    return (1 - p**world) / (world * (1 - p))


def others_arrived(p: float, world: int) -> Iterator[tuple[int, float]]:
    """How many of ``world`` - 1 other ranks' contributions reach an owner, each with its chance."""
    for k in range(world):
        yield k, comb(world - 1, k) * (1 - p) ** k * p ** (world - 1 - k)


def inflation(p: float, world: int) -> float:
    """Variance of the mean of what arrived, over that of the lossless mean."""
    return world * mean_inverse_count(p, world)


def stratified_variance(p: float, world: int) -> float:
    """The same of a reduce-scatter by count, whose owner weighs 1 / world whatever arrives, where
    some other rank's contribution did."""
    some = 1 - p ** (world - 1)
    inverse = sum(chance / k for k, chance in others_arrived(p, world) if k) / some
    return (1 + (world - 1) ** 2 * inverse) / world


def stratified_sums_variance(p: float, own: int, others: tuple[int, ...], mean: float) -> float:
    """The same where partial sums are lost, of contributions of N(mean, 1): the owner's host has
    ``own`` ranks, the others so many each. Sums that arrive stand for those that don't."""
    world, hosts = own + sum(others), len(others)
    total, some = 0.0, 1 - p**hosts
    away, square = sum(others), sum(n * n for n in others)
    for k in range(1, hosts + 1):
        chance = comb(hosts, k) * (1 - p) ** k * p ** (hosts - k) / some
        spread = square - away * away / hosts
        # The variance of a sample's sum without replacement, by its size.
        uneven = hosts / k * (hosts - k) / (hosts - 1) * spread if hosts > 1 else 0.0
        total += chance * (own + hosts / k * away + mean * mean * uneven)
    return total / world


def weighted_variance(p: float, world: int, mean: float = 0.0) -> float:
    """The same of the mean weighted by 1 / (1 - p), from contributions of N(mean, 1): what is lost
    or not multiplies the mean as well."""
    lost = (world - 1) * p / (1 - p)
    return (1 + (world - 1) / (1 - p)) / world + lost / world * mean * mean


def count_mean_uneven(own: float, others: list[tuple[float, float]]) -> float:
    """Expected mean by count at an owner; ``others``: (contribution, loss of its link)."""
    total = 0.0
    for which in range(1 << len(others)):
        chance, values = 1.0, [own]
        for i, (value, loss) in enumerate(others):
            arrives = which >> i & 1
            chance *= 1 - loss if arrives else loss
            values += [value] * arrives
        total += chance * sum(values) / len(values)
    return total


# ---- parameters that are broadcast at each step; a lost packet leaves the stale value ----


def broadcast_drift(p: float, variance: float = 1.0, mean: float = 0.0) -> float:
    """Between two receivers, if the owner's value moves by ``mean`` and ``variance`` a step."""
    return 2 * p / (1 - p * p) * variance + 2 * p / (1 - p) ** 2 * mean * mean


def broadcast_drift_published(p: float) -> float:
    """The same with 2p / (1 + p), as it is published: right if ``variance`` is that of the jump in
    which one receiver alone misses the packet, which is 1 / (1 - p) times that of a step."""
    return 2 * p / (1 + p)


def owner_distance(p: float) -> float:
    """Between the owner and a receiver, at variance 1 a step."""
    return p / (1 - p)


def staleness_tail(p: float, steps: int) -> float:
    """The chance that a receiver's value is at least so many steps old."""
    return p**steps


def burst_drift(p: float, burst: float) -> float:
    """:func:`broadcast_drift` at variance 1 where a receiver's losses come in runs (Gilbert) of
    ``burst`` steps on average."""
    end = 1 / burst
    return 2 * p / end * (1 - p / (2 - end))


# ---- gradients that are reduced, where each replica steps by itself ----


def free_drift_per_step(p: float, world: int) -> float:
    """What the distance of two replicas grows by in a step of the transpose, own data where no
    reduction arrives; per element, if contributions are independent with variance 1."""
    inverse = mean_inverse_count(p, world)
    # Of the mean from a rank's own contribution, which is in it if it reached the owner.
    apart = inverse + 1 - 2 * (1 - inverse) / (world - 1)
    neither_owns = (world - 2) / world
    return neither_owns * (2 * p * (1 - p) * apart + p * p * 2) + 2 / world * p * apart


def free_drift_of_squares(p: float, world: int) -> float:
    """The mean of (g^2 - h^2)^2 of two replicas' means g, h of one step, as above: for normal g and
    h that is 3 g^4 + 3 h^4 - 2 g^2 h^2 - 4 (gh)^2, each of these a variance or covariance."""
    apart = 0.0
    for k, chance in others_arrived(p, world):
        r = k + 1
        apart += chance * (3 / r**2 + 3 - 2 / r - 4 * k / (world - 1) / r**2)
    neither_owns = (world - 2) / world
    return neither_owns * (2 * p * (1 - p) * apart + p * p * 4) + 2 / world * p * apart


def state_drift(p: float, world: int, state: str, beta: float) -> float:
    """What the distance of two replicas' optimizer state stays at, per element. ``state``:
    momentum_buffer sums gradients that fade by ``beta``, exp_avg and exp_avg_sq are means of
    them, and of their squares."""
    if state == "momentum_buffer":
        return free_drift_per_step(p, world) / (1 - beta**2)
    of = {"exp_avg": free_drift_per_step, "exp_avg_sq": free_drift_of_squares}[state]
    return of(p, world) * (1 - beta) / (1 + beta)


def bounded_drift(per_step: float, period: int, world: int, missed: float = 0.0) -> float:
    """The steady distance with DriftBound after a step, averaged over its sweep: what was sent
    after the step before has been taken before this one. ``missed``: the chance that a
    rank misses a packet of it, p ** (1 + repair)."""
    together = 2 / world * (1 - missed) + (1 - 2 / world) * (1 - missed) ** 2
    return per_step * ((period + 1) / 2 + period * (1 - together) / together)
