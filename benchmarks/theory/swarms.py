"""What averaging in the groups of a swarm leaves of the peers' variance, with lost packets: by
peers with real sockets, or by the reference executor over the same grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lossycoll.options.fields import Options
from lossycoll.plan import owners
from lossycoll.plan.codec import Floats, elements_of
from lossycoll.plan.faults import Inject, parse
from lossycoll.plan.grid import Grid, placed
from lossycoll.runtime.engine.payload import payload_bytes
from lossycoll.runtime.swarm.member import MTU, SwarmMember
from lossycoll.runtime.swarm.server import DirectoryServer
from tests.oracle.masks import lost
from tests.oracle.reference_executor import execute

from . import formulas

SESSION: Final = "5eed" * 4
"""Peers sit, and move, by it."""
SCHEMA: Final = "5c" * 16
SECONDS: Final = 30.0
LOSSES: Final = (0.01, 0.05, 0.1, 0.3)
SINGLE: Final = (((4, 4), 16), ((2, 2, 2), 8), ((2, 4), 8), ((8,), 8), ((4, 2), 7))
"""Grids, and how many peers are in each."""
MANY: Final = (
    ((4, 4), 16, 8, (0.0, 0.01, 0.1, 0.3)),
    ((2, 2, 2), 8, 6, (0.0, 0.1)),
    ((4, 4), 12, 8, (0.0, 0.1)),
)
"""And how many rounds they have, at which losses."""
OFTEN, RUNS = 48, 32
"""Single rounds, and runs of many."""
FEW_BITS: Final = "int8"
VALUES: Final = 100_000
Groups: TypeAlias = list[tuple[int, ...]]
"""Of a round: the peers of each, in order of their ranks."""
Sizes: TypeAlias = tuple[int, ...]
"""Of a round's groups, in descending order."""
Wide: TypeAlias = NDArray[np.float64]


class Peers(Protocol):
    """Has rounds. ``per_packet``: values that are lost together."""

    per_packet: int

    def average(self, values: Sequence[Floats]) -> Groups:
        """One round of all, in place."""
        ...


class Members:
    """Peers with engines and sockets in this process, and a directory."""

    def __init__(self, stack: ExitStack, grid: Grid, count: int, inject: str, wire: str) -> None:
        server = DirectoryServer(
            "127.0.0.1", 0, shape=grid.shape, patience=SECONDS, session=SESSION
        )
        stack.callback(server.close)
        self.per_packet = elements_of(wire, "f32", payload_bytes(MTU, 4))
        self._loses = parse(inject).loss > 0
        self.members: list[SwarmMember] = []
        for number in range(count):
            options = Options(link="udp", inject=inject, repair=0)
            one = SwarmMember([("127.0.0.1", server.port)], name=str(number), options=options)
            stack.callback(one.close)
            assert one.number == number
            one.averages(SCHEMA, wire=wire)
            self.members.append(one)
        self._pool = stack.enter_context(ThreadPoolExecutor(count))
        self.contributions = 0.0
        """Of the last round, per value."""

    def average(self, values: Sequence[Floats]) -> Groups:
        reports = list(
            self._pool.map(lambda one, own: one.average(own, 1.0, SECONDS), self.members, values)
        )
        for one in reports:
            assert not one.failure, one.failure
            assert not one.missing, one.missing
            if not self._loses:  # no more than what is injected, or theory is of another loss
                assert one.contributions == len(one.members), one
        self.contributions = float(np.mean([one.contributions for one in reports]))
        return sorted({one.members for one in reports})


class Reference:
    """The same means by the reference executor. Each group of a round has losses of its own."""

    per_packet = 16

    def __init__(self, grid: Grid, count: int, inject: str) -> None:
        self._grid, self._faults = grid, parse(inject)
        self._cells = placed(count, grid, np.random.default_rng(1))
        self._round, self._formed = 0, 0

    def average(self, values: Sequence[Floats]) -> Groups:
        found = self._grid.groups(self._cells, self._round)
        self._cells = self._grid.moved(self._cells, self._round, int(SESSION, 16))
        groups = [tuple(map(int, one[np.argsort(self._cells[one])])) for one in found]
        for members in groups:
            self._formed += 1
            mine = [values[peer] for peer in members]
            exchange(mine, self._faults, self._formed, self.per_packet)
        self._round += 1
        return groups


def exchange(values: list[Floats], faults: Inject, group: int, per_packet: int) -> None:
    """The means of a group, in place, with the packets lost that its engines lose. ``group``: its
    number."""
    world = len(values)
    lengths = owners.owned(len(values[0]), per_packet, (1,) * world)
    gives, weights = (True,) * world, np.ones((world, world))
    plans = [owners.all_reduce(world, rank, lengths, gives, per_packet) for rank in range(world)]
    gone = partial(lost, faults, group, 0)
    execute(plans, values, values, "f32", 1.0, gone, 0, weights=weights, divisor=0.0)


def injected(loss: float) -> str:
    """What peers inject."""
    return f"loss={loss},seed=11"


@contextmanager
def averaging(
    executor: str, shape: Sequence[int], peers: int, loss: float, *, wire: str = "same"
) -> Iterator[Peers]:
    """Peers in a grid of this shape, by either executor."""
    inject = injected(loss)
    with ExitStack() as stack:
        if executor == "reference":
            yield Reference(Grid(tuple(shape)), peers, inject)
        else:
            yield Members(stack, Grid(tuple(shape)), peers, inject, wire)


# ---- what is measured ----


@dataclass(frozen=True)
class Share:
    """A ratio of two sums over packets, and its standard error."""

    value: float
    error: float


@dataclass
class Sums:
    """Of packets, one after another: what is above the line, and what is below it."""

    above: list[Wide]
    below: list[Wide]

    @classmethod
    def none(cls) -> Sums:
        return cls([], [])

    def add(self, above: Wide, below: Wide, per_packet: int) -> None:
        """Figures of single values."""
        begins = np.arange(0, len(above), per_packet)
        self.above.append(np.add.reduceat(above, begins))
        self.below.append(np.add.reduceat(below, begins))

    @property
    def share(self) -> Share:
        above, below = np.concatenate(self.above), np.concatenate(self.below)
        value = float(above.sum() / below.sum())
        error = math.sqrt(float(np.square(above - value * below).sum())) / float(below.sum())
        return Share(value, error)


def draw(rng: np.random.Generator, peers: int, count: int) -> list[Floats]:
    """Values of N(0, 1) of each peer."""
    return [rng.standard_normal(count, np.float32) for _ in range(peers)]


def wide(values: Sequence[Floats]) -> Wide:
    """Shape (peer, value)."""
    return np.stack(values).astype(np.float64)


@dataclass(frozen=True)
class Round:
    """What rounds leave of values that are drawn anew for each: all over the variance before."""

    variance: Share  # of the peers' values
    moved: Share  # the square of what the mean of all has moved by
    # by how much groups' sums move, for what an owner's value is more than the mean of the others';
    # of groups of one size
    lean: Share | None
    contributions: float | None  # of how many peers a value is the mean; by sockets alone


def single_rounds(
    executor: str,
    shape: Sequence[int],
    peers: int,
    loss: float,
    *,
    count: int,
    rounds: int,
    seed: int = 3,
) -> dict[Sizes, Round]:
    """Rounds of ``count`` values, by the sizes of their groups in descending order."""
    rng = np.random.default_rng(seed)
    sums: dict[Sizes, tuple[Sums, Sums, Sums, list[float]]] = {}
    with averaging(executor, shape, peers, loss) as swarm:
        each = swarm.per_packet
        for _ in range(rounds):
            values = draw(rng, peers, count)
            before = wide(values)
            groups = swarm.average(values)
            after, was = wide(values), before.var(axis=0)
            sizes = tuple(sorted(map(len, groups), reverse=True))
            variance, moved, lean, contributions = sums.setdefault(
                sizes, (Sums.none(), Sums.none(), Sums.none(), [])
            )
            variance.add(after.var(axis=0), was, each)
            moved.add(np.square(after.mean(axis=0) - before.mean(axis=0)), was, each)
            if len(set(sizes)) == 1:
                lean.add(*_leans(before, after, groups, each), each)
            if isinstance(swarm, Members):
                contributions.append(swarm.contributions)
    return {
        sizes: Round(
            variance.share,
            moved.share,
            lean.share if lean.above else None,
            float(np.mean(contributions)) if contributions else None,
        )
        for sizes, (variance, moved, lean, contributions) in sums.items()
    }


def _leans(before: Wide, after: Wide, groups: Groups, per_packet: int) -> tuple[Wide, Wide]:
    """Of each value, the sums over groups of two products of what an owner has more than the
    others: with what the group's sum has moved by, and with itself."""
    count = before.shape[1]
    above, below = np.zeros(count), np.zeros(count)
    for members in groups:
        world, mine = len(members), before[list(members)]
        lengths = owners.owned(count, per_packet, (1,) * world)
        own = mine[np.repeat(np.arange(world), lengths), np.arange(count)]
        total = mine.sum(axis=0)
        more = own - (total - own) / (world - 1)
        above += (after[list(members)].sum(axis=0) - total) * more
        below += more * more
    return above, below


@dataclass(frozen=True)
class After:
    """After so many rounds, over the variance at the beginning."""

    variance: Share  # of the peers' values
    moved: Share  # the square of what the mean of all has moved by


def many_rounds(
    executor: str,
    shape: Sequence[int],
    peers: int,
    loss: float,
    *,
    count: int,
    rounds: int,
    runs: int,
    wire: str = "same",
    seed: int = 4,
) -> tuple[list[After], list[list[Sizes]]]:
    """Runs of as many rounds, a multiple of the grid's axes, each of new values."""
    assert rounds % len(shape) == 0
    rng = np.random.default_rng(seed)
    variance, moved = ([Sums.none() for _ in range(rounds)] for _ in range(2))
    sizes: list[list[Sizes]] = [[] for _ in range(rounds)]
    with averaging(executor, shape, peers, loss, wire=wire) as swarm:
        for _ in range(runs):
            values = draw(rng, peers, count)
            begin = wide(values)
            was, mean = begin.var(axis=0), begin.mean(axis=0)
            for number in range(rounds):
                groups = swarm.average(values)
                sizes[number].append(tuple(sorted(map(len, groups), reverse=True)))
                now = wide(values)
                variance[number].add(now.var(axis=0), was, swarm.per_packet)
                moved[number].add(np.square(now.mean(axis=0) - mean), was, swarm.per_packet)
    found = [After(one.share, other.share) for one, other in zip(variance, moved, strict=True)]
    return found, sizes


# ---- for docs/theory.md ----


def single() -> list[dict[str, Any]]:
    """A row for each loss, grid, and sizes of its groups."""
    rows: list[dict[str, Any]] = []
    for loss in (0.0, *LOSSES):
        for shape, peers in SINGLE:
            seed = len(rows)
            found = single_rounds(
                "sockets", shape, peers, loss, count=VALUES, rounds=OFTEN, seed=seed
            )
            for sizes, one in sorted(found.items(), reverse=True):
                distance, moved = formulas.one_round(loss, sizes)
                counted = sum(size * formulas.mean_of(loss, size) for size in sizes)
                predicted = {
                    "variance": distance - moved,
                    "moved": moved,
                    "lean": formulas.lean_to_owner(loss, sizes[0]) if one.lean else None,
                    "contributions": counted / peers,
                }
                grid = {"grid": "x".join(map(str, shape)), "peers": peers, "sizes": sizes}
                rows.append({**grid, "loss": loss, **asdict(one), "predicted": predicted})
    return rows


def many() -> list[dict[str, Any]]:
    """A row for each grid and loss: what is left after each round, also in few bits."""
    cases: list[tuple[tuple[int, ...], int, int, float, str]] = [
        (shape, peers, rounds, loss, "same")
        for shape, peers, rounds, losses in MANY
        for loss in losses
    ]
    cases += [((4, 4), 16, 16, loss, FEW_BITS) for loss in (0.0, 0.1, 0.3)]
    rows = []
    for number, (shape, peers, rounds, loss, wire) in enumerate(cases):
        found, sizes = many_rounds(
            *("sockets", shape, peers, loss),
            count=VALUES,
            rounds=rounds,
            runs=RUNS,
            wire=wire,
            seed=number,
        )
        is_full = math.prod(shape) == peers
        wanted = formulas.full_grid(loss, shape, rounds) if is_full else None
        variances = None if wanted is None else [all_of - moved for all_of, moved in wanted]
        rows.append(
            {
                "grid": "x".join(map(str, shape)),
                "peers": peers,
                "loss": loss,
                "wire": wire,
                "variance": [asdict(one.variance) for one in found],
                "moved": [asdict(one.moved) for one in found],
                "variance_predicted": variances,
                "moved_predicted": None if wanted is None else [moved for _, moved in wanted],
                "product": products(loss, sizes),
            }
        )
    return rows


def products(loss: float, sizes: Sequence[Sequence[Sizes]]) -> list[float]:
    """What rounds would leave of the variance, one after another, were their groups drawn at
    random; the mean over runs."""
    factors = [[formulas.variance_factor(loss, one) for one in of_round] for of_round in sizes]
    return [float(one) for one in np.cumprod(factors, axis=0).mean(axis=1)]


def groups() -> dict[str, list[dict[str, Any]]]:
    """All tables."""
    return {"single": single(), "many": many()}
