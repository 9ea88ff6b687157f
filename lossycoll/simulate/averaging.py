"""Rounds that peers need to agree, by each way of averaging, where some fail in each round.

Each peer begins with a number from N(0, 1), and a round replaces numbers by means. In each round
each peer fails by itself with some probability: it then neither gives nor takes. Source of methods
and failures: the program behind the tables of Ryabinin et al., "Moshpit SGD" (NeurIPS 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..errors import OptionError
from ..plan.grid import Grid, placed

Values = NDArray[np.float64]
Alive = NDArray[np.bool_]
Draws = np.random.RandomState
"""As the paper's program draws: its runs are those of the seeds 0 to 9, number by number, but for
the cells of the grid, which it drew without a seed."""
Round = Callable[[Values, Alive, int], Values]
"""One round: (values, who takes part, its number from 0), to the values after it."""
Method = Callable[[int, Grid, Draws], Round]
"""Makes the rounds of one run: (peers, grid, where it draws from)."""


def all_reduce(peers: int, grid: Grid, generator: Draws) -> Round:
    """One group of all; a round in which anybody fails is lost."""

    def step(values: Values, alive: Alive, number: int) -> Values:
        return np.full_like(values, values.mean()) if alive.all() else values

    return step


def gossip(peers: int, grid: Grid, generator: Draws) -> Round:
    """A ring: the mean of a peer and of its two neighbours."""
    here = np.arange(peers)
    return _mixing([[(here, here), (here, (here + 1) % peers), (here, (here - 1) % peers)]])


def push_sum(peers: int, grid: Grid, generator: Draws) -> Round:
    """SGP: the mean of a peer and of those 2^k and 2^(k+1) places on, k one more in each round.

    As in the paper's program, whose matrices are rolled as one row: over the end of the ring the
    neighbour belongs to the next peer, and one has none.
    """

    def hop(distance: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        flat = (np.arange(peers) * (peers + 1) + distance) % (peers * peers)
        return flat // peers, flat % peers

    here = np.arange(peers)
    hops = max(1, int(np.log2(max(peers - 1, 2))))
    # The program counts rounds from 1.
    turns = [[(here, here), hop(1 << k), hop(2 << k)] for k in range(hops)]
    return _mixing(turns[1:] + turns[:1])


def random_groups(peers: int, grid: Grid, generator: Draws) -> Round:
    """Groups of the length of the grid's first axis, drawn anew in each round among those that
    don't fail; what is left over joins the first ones."""
    size = grid.shape[0]

    def step(values: Values, alive: Alive, number: int) -> Values:
        present = np.flatnonzero(alive)
        generator.shuffle(present)
        count = max(1, len(present) // size)
        group = np.arange(len(present))
        group = np.where(group < count * size, group // size, group % count)
        return _grouped(values, present, group)

    return step


def _lines(peers: int, grid: Grid, generator: Draws, *, moves: bool) -> Round:
    """The rows of a grid, in whose cells peers stay, or move by the paper's rule
    (:meth:`Grid.moved`)."""
    # Draws of their own, which take none of the run's.
    places = np.random.default_rng(int(generator.get_state(legacy=False)["state"]["key"][0]))
    cells, seed = placed(peers, grid, places), int(places.integers(1 << 63))

    def step(values: Values, alive: Alive, number: int) -> Values:
        nonlocal cells
        present = np.flatnonzero(alive)
        rows = grid.row(cells[present], grid.axis(number))
        if moves:
            cells = grid.moved(cells, number, seed)
        return _grouped(values, present, np.unique(rows, return_inverse=True)[1])

    return step


def _grouped(values: Values, present: NDArray[np.intp], group: NDArray[np.intp]) -> Values:
    """``values`` with those of the peers that are ``present`` replaced by their group's mean."""
    out: Values = values.copy()
    if len(present):
        sums = np.bincount(group, weights=values[present])
        out[present] = (sums / np.bincount(group))[group]
    return out


def _mixing(turns: Sequence[Sequence[tuple[NDArray[np.intp], NDArray[np.intp]]]]) -> Round:
    """In each turn (receivers, senders): the mean of what arrives, all weights alike."""

    def step(values: Values, alive: Alive, number: int) -> Values:
        turn = turns[number % len(turns)]
        to = np.concatenate([receivers for receivers, _ in turn])
        of = np.concatenate([senders for _, senders in turn])
        works = alive[to] & alive[of]
        sums = np.bincount(to[works], weights=values[of[works]], minlength=len(values))
        counts = np.bincount(to[works], minlength=len(values))
        return np.where(counts > 0, sums / np.maximum(counts, 1), values)

    return step


METHODS: Final[dict[str, Method]] = {
    "moshpit": partial(_lines, moves=False),  # as in the published table
    "moshpit_chunks": partial(_lines, moves=True),  # as swarms do
    "random_groups": random_groups,
    "all_reduce": all_reduce,
    "sgp": push_sum,
    "gossip": gossip,
}
"""Methods by name, in the order of tables."""


def variances(
    method: Method, peers: int, grid: Grid, failure: float, rounds: int, seed: int
) -> Values:
    """The variance of the peers' values before the first round and after each, shape (rounds + 1,).
    ``failure``: probability that a peer fails in a round."""
    if peers < 2 or not 0 <= failure < 1:
        raise OptionError(f"{peers} peers that fail with {failure}; wanted at least 2, and 0 to 1")
    if peers > grid.cells:
        raise OptionError(f"{peers} peers don't fit into {grid}, which has {grid.cells} cells")
    generator = Draws(seed)
    step = method(peers, grid, generator)
    values = generator.standard_normal(peers)
    found = [values.var()]
    for number in range(rounds):
        values = step(values, generator.random_sample(peers) >= failure, number)
        found.append(values.var())
    return np.array(found)


def rounds_to(
    method: Method,
    peers: int,
    grid: Grid,
    failure: float,
    targets: Sequence[float],
    *,
    seeds: int,
    most: int = 50,
) -> list[float]:
    """Rounds until the variance is below each of ``targets``, the mean over ``seeds`` runs. A run
    that takes longer counts as ``most``."""
    taken = np.zeros((seeds, len(targets)))
    for seed in range(seeds):
        path = variances(method, peers, grid, failure, most, seed)
        for k, target in enumerate(targets):
            below = np.flatnonzero(path < target)
            taken[seed, k] = min(below[0], most) if len(below) else most
    return [float(mean) for mean in taken.mean(axis=0)]
