"""What the theory predicts, as formulas. docs/theory.md says where each comes from.

``p``: the share of packets lost, each on its own; ``world``: ranks. Distances are squared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb, prod


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


# ---- means over the groups of a swarm ----


def grouped(p: float, members: int) -> tuple[float, float]:
    """What a round leaves of independent values with variance 1: the variance of each, and the
    covariance of two of a group of so many."""
    e = mean_inverse_count(p, members)
    missed = p * (members - 1) / members
    own = e + missed * (1 - e)
    if members == 1:
        return own, 0.0
    # Of a mean with the value of one that isn't its owner.
    c = (1 - e) / (members - 1)
    owner = (1 - p) * e + p * c
    neither = (1 - p) ** 2 * e + 2 * p * (1 - p) * c
    return own, 2 / members * owner + (1 - 2 / members) * neither


def one_round(p: float, sizes: Sequence[int]) -> tuple[float, float]:
    """After a round in groups of these sizes, drawn at random: the mean square distance from the
    mean that all peers had before, and that of their mean now from it. Over the variance before;
    their difference is the variance that is left, over the variance before."""
    peers, own, pairs = sum(sizes), 0.0, 0.0
    for members in sizes:
        of_one, of_two = grouped(p, members)
        own += members * of_one
        pairs += members * (members - 1) * of_two
    return (own - 1) / (peers - 1), ((own + pairs) / peers - 1) / (peers - 1)


def variance_factor(p: float, sizes: Sequence[int]) -> float:
    """What a round in groups of these sizes, drawn at random, leaves of the variance."""
    distance, moved = one_round(p, sizes)
    return distance - moved


def lean_to_owner(p: float, members: int) -> float:
    """By how much the sum of a group's values moves, for what the owner's value is more than the
    mean of the others'."""
    return p * mean_inverse_count(p, members) - p**members


def mean_of(p: float, members: int) -> float:
    """Of how many peers a value is the mean: 1 where none came back."""
    missed = p * (members - 1) / members
    return missed + (1 - missed) * (1 + (members - 1) * (1 - p))


def full_grid(p: float, shape: Sequence[int], rounds: int) -> list[tuple[float, float]]:
    """As :func:`one_round` after each round of a grid without an empty cell, whose peers move on
    their lines, over the variance at the beginning.

    Pairs of peers are told apart by the axes along which their cells differ, bits of a number. A
    round makes those of a line alike, and shuffles each line: who owns what there is dealt anew.
    """
    peers, sets = prod(shape), range(1 << len(shape))
    covariance = [float(not differ) for differ in sets]
    pairs = [
        prod(length - 1 for axis, length in enumerate(shape) if differ >> axis & 1)
        for differ in sets
    ]
    found = []
    for number in range(rounds):
        axis = number % len(shape)
        length, bit = shape[axis], 1 << axis
        on_line = covariance[bit]
        apart = covariance[0] - on_line
        for differ in sets:
            if not differ & bit:
                same, other = covariance[differ], covariance[differ | bit]
                covariance[differ] = covariance[differ | bit] = other + (same - other) / length
        covariance[0], covariance[bit] = (on_line + apart * c for c in grouped(p, length))
        of_mean = sum(many * one for many, one in zip(pairs, covariance, strict=True))
        found.append(((peers * covariance[0] - 1) / (peers - 1), (of_mean - 1) / (peers - 1)))
    return found
