"""Tables of a directory: its peers, their placement in the cells of a grid, dirty queue, id
allocator, donors, unreachable pairs, and progress. The placement is indexed by cell: a lookup takes
as long in a swarm of thousands as in one of a few."""

from __future__ import annotations

import bisect
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from lossycoll.errors import OptionError
from lossycoll.plan.grid import Cells, Grid, fitting, parse
from lossycoll.plan.rng import mix
from lossycoll.runtime.control.schema import Address

from .protocol import MOST_MEMBERS, MOST_PEERS, MOST_WEIGHT, Averages, Here, Member, Offers

MOST_CELLS: Final = 1 << 16
DRAWS: Final = 16  # draws of a newcomer's cell before it gets the next free one
KNOWN: Final = 16  # rounds that it is learnt from how long peers take
KEPT_SECONDS: Final = 60.0
"""For which a peer that was lost finds its number free when it comes again."""
FIRST_UNREACHABLE, MOST_UNREACHABLE = 10.0, 600.0
"""Seconds for which a pair isn't put into one group: at first, and at most. Each time that it fails
again they double, unless that is so long ago."""
MOST_SINCE: Final = 1 << 32
MOST_TARGETS: Final = 4  # targets that a peer's report counts at most. In a mean it counts one
MOST_SAMPLES: Final = 1 << 52


@dataclass(slots=True, eq=False)
class Peer:
    number: int
    name: str
    incarnation: str
    seen: float
    came: int  # number of peers that came before it
    round: int = -1  # the one that it averages in next, by Rounds.move; -1: it isn't here
    cell: int = -1
    said: Averages | None = None  # tensors that it averages, or a draft
    schema: str = ""  # schema of its tensors; "": not all are announced
    serves: tuple[int, int, Address] | None = None
    """Its own directory, for the time after this one, or one that it would open: 0, the number of
    peers that came before it, and the address; or 1, its own number, and the address."""
    told: bool = False  # it is to turn to another directory: no round begins with it here
    place: Here | None = None
    weight: float | None = None  # weight of its ready tensors; None: none are ready
    ready_at: float = 0.0
    began: float = 0.0  # when its latest round began, or it said what it averages
    samples: int = 0  # that the swarm had had when its latest round began, or as its state says
    since: int = 0  # its own samples since then
    due: bool = False  # it has heard that a round is due by samples, and hasn't been in one since
    came_back: bool = False  # it has had a connection to a directory before: its state is no news
    behind: int = 0  # samples of another peer's state that it is to take; 0: none
    took: deque[float] = field(default_factory=lambda: deque(maxlen=KNOWN))
    """Seconds from the begin of a round until it was ready for the next."""
    came_late: bool = False
    """Others had had rounds before it said what it averages, and it none yet."""
    skipped: bool = False
    """Nobody waits for it until it is ready: a round has begun without it, or it came after the
    first one and hasn't said what it averages."""
    group: tuple[int, ...] = ()  # numbers of its latest group's members
    partners: set[int] = field(default_factory=set)
    """Numbers of the other ends of its state transfers."""

    @property
    def is_ready(self) -> bool:
        """True if it has something to average, and others know where it is."""
        return self.weight is not None and self.place is not None

    @property
    def member(self) -> Member:
        assert self.place is not None
        weight, place, rate = self.weight or 0.0, self.place, self.said.rate if self.said else 0
        return Member(
            self.number, place.host, place.port, self.incarnation, weight, rate, place.others
        )


class Rounds:
    """Counts of a directory's peers by their next round: nobody has to ask each of them."""

    def __init__(self) -> None:
        self._peers: Counter[int] = Counter()

    def move(self, peer: Peer, number: int) -> None:
        self.leave(peer)
        peer.round = number
        self._peers[number] += 1

    def leave(self, peer: Peer) -> None:
        if peer.round >= 0:
            self._peers[peer.round] -= 1
            if not self._peers[peer.round]:
                del self._peers[peer.round]
            peer.round = -1

    @property
    def furthest(self) -> int:
        """The round of the peer that is furthest; 0: nobody is here."""
        return max(self._peers, default=0)

    @property
    def least(self) -> int:
        return min(self._peers, default=0)


class GridRow(NamedTuple):
    """Row of a grid: the cells that differ in one coordinate alone. ``axis``: along which it lies.
    ``first``: its first cell."""

    axis: int
    first: int


class Placement:
    """Cells of a grid, and the peers in them. ``shape``: the grid's; empty: it follows the number
    of peers. ``most``: peers in a group at most, where it does. ``grid``: whose cells they are.
    ``fixed``: it doesn't follow the peers. OptionError: a row is too long for a group."""

    def __init__(self, shape: Sequence[int], most: int) -> None:
        self.grid = Grid(tuple(shape) or (1,))
        self.fixed = bool(shape)
        self._most = most
        self._at: dict[int, Peer] = {}
        if reason := _too_long(self.grid):
            raise OptionError(reason)

    def set_grid(self, text: str, peers: int) -> str:
        """Set the grid: all get new cells. Returns why it can't be; "": it is."""
        try:
            grid = parse(text)
        except ValueError as error:
            return str(error)[:200]
        if grid.cells > MOST_CELLS:
            return f"a grid of {grid} has more than {MOST_CELLS} cells"
        if peers > grid.cells:
            return f"{peers} peers don't fit into a grid of {grid}"
        if reason := _too_long(grid):
            return reason
        self._reset(grid, self.placed())
        self.fixed = True
        return ""

    def placed(self) -> list[Peer]:
        return list(self._at.values())

    def come(self, peer: Peer, draw: Callable[[int], int]) -> bool:
        """A newcomer takes a cell that is free. Of a fixed grid there is one. ``draw``: a number,
        another one for each turn. Returns whether all sit anew."""
        if self._follows(peer):
            return True
        cells = self.grid.cells
        draws = (draw(turn) % cells for turn in range(DRAWS))
        cell = next((one for one in draws if one not in self._at), draw(DRAWS - 1) % cells)
        while cell in self._at:
            cell = (cell + 1) % cells
        self._at[cell] = peer
        peer.cell = cell
        return False

    def leave(self, peer: Peer) -> bool:
        """A peer has its cell no more, if it had one. Returns whether all others sit anew."""
        if self._at.get(peer.cell) is peer:
            del self._at[peer.cell]
        peer.cell = -1
        return self._follows()

    def _follows(self, *come: Peer) -> bool:
        """Where the grid follows the peers: a new one if they don't fit, or if half the cells or
        fewer axes would do. Then all are placed anew."""
        if self.fixed:
            return False
        count = max(1, len(self._at) + len(come))
        best = fitting(count, self._most)
        fits = count <= self.grid.cells <= 2 * best.cells
        if fits and len(self.grid.shape) <= len(best.shape):
            return False
        self._reset(best, [*self.placed(), *come])
        return True

    def _reset(self, grid: Grid, peers: Sequence[Peer]) -> None:
        self.grid = grid
        self._at = dict(enumerate(sorted(peers, key=lambda one: one.number)))
        for cell, peer in self._at.items():
            peer.cell = cell

    def clear(self) -> None:
        for peer in self._at.values():
            peer.cell = -1
        self._at = {}

    def move(self, peers: Sequence[Peer], cells: Cells) -> None:
        """Peers go to other cells, of which those are free that none of them has."""
        for peer in peers:
            del self._at[peer.cell]
        for peer, cell in zip(peers, cells, strict=True):
            peer.cell = int(cell)
            self._at[peer.cell] = peer

    def row_of(self, cell: int, axis: int) -> GridRow:
        return GridRow(axis, self.grid.row(cell, axis))

    def rows_of(self, cell: int) -> list[GridRow]:
        return [self.row_of(cell, axis) for axis in range(len(self.grid.shape))]

    def on(self, row: GridRow) -> list[Peer]:
        cells = self.grid.on(row.first, row.axis)
        if len(cells) <= len(self._at):
            return [self._at[cell] for cell in cells if cell in self._at]
        return [self._at[cell] for cell in sorted(self._at) if cell in cells]


def _too_long(grid: Grid) -> str:
    """Why no groups can be formed on a grid; "": they can."""
    if max(grid.shape) <= MOST_MEMBERS:
        return ""
    return f"a grid of {grid} has rows of more than {MOST_MEMBERS} cells: no group is larger"


class DirtyQueue:
    """Queue of grid rows whose groups may have become complete."""

    def __init__(self) -> None:
        self._now: set[GridRow] = set()
        self._times: dict[GridRow, float] = {}
        self._queue: list[tuple[float, GridRow]] = []
        """All times, those that don't hold any more among them."""

    def mark(self, rows: Iterable[GridRow]) -> None:
        self._now.update(rows)

    def schedule(self, row: GridRow, at: float | None) -> None:
        """Schedule a row for ``at``, when time alone changes it; None: it doesn't."""
        if at is None:
            self._times.pop(row, None)
        elif self._times.get(row) != at:
            self._times[row] = at
            heapq.heappush(self._queue, (at, row))

    def take(self, now: float) -> list[GridRow]:
        while self._queue and self._queue[0][0] <= now:
            at, row = heapq.heappop(self._queue)
            if self._times.get(row) == at:
                del self._times[row]
                self._now.add(row)
        found, self._now = sorted(self._now), set()
        return found

    def clear(self) -> None:
        self._now, self._times, self._queue = set(), {}, []

    def wakes(self, now: float) -> float | None:
        """Time at which a row is due next; None: there is none."""
        if self._now:
            return now
        while self._queue and self._times.get(self._queue[0][1]) != self._queue[0][0]:
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else None


class IdAllocator:
    """Allocator of peer numbers. The number of a lost peer stays free for a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._free = list(range(MOST_PEERS))  # in their order
        self._former: dict[int, tuple[str, float]] = {}
        """Numbers of departed peers: who had each, and until when it stays reserved."""

    def take(self, wanted: int, name: str, draw: int | None) -> int:
        """A number for a peer that comes. There is one. ``draw``: says which it gets if that is
        another's by now; None: the lowest."""
        at, now = bisect.bisect_left(self._free, wanted), self._clock()
        if at < len(self._free) and self._free[at] == wanted:
            return self._free.pop(at)

        def is_kept(number: int) -> bool:
            former, until = self._former.get(number, (name, now))
            return now < until and former != name

        found = (at for at, one in enumerate(self._free) if not is_kept(one))
        if draw is None:
            return self._free.pop(next(found, 0))
        several = list(found) or range(len(self._free))
        return self._free.pop(several[draw % len(several)])

    def give_back(self, number: int, name: str) -> None:
        self._former[number] = name, self._clock() + KEPT_SECONDS
        bisect.insort(self._free, number)


class Donors:
    """Peers that have a state for newcomers, and the joiners that seek one. ``unreachable``: pairs
    that can't reach each other."""

    def __init__(self, unreachable: UnreachablePairs) -> None:
        self._unreachable = unreachable
        self._offer: dict[int, Peer] = {}
        self._seek: dict[int, tuple[Peer, int]] = {}

    def offers(self, peer: Peer, has: bool) -> None:
        if has:
            self._offer[peer.number] = peer
        else:
            self._offer.pop(peer.number, None)

    def seeks(self, peer: Peer, donors: int) -> None:
        """A newcomer wants a state, of so many peers at most; of none, none any more."""
        self._seek[peer.number] = peer, min(donors, MOST_MEMBERS)

    def lost(self, number: int) -> None:
        self._offer.pop(number, None)
        self._seek.pop(number, None)

    def asked(self) -> list[tuple[Peer, int]]:
        """Remove and return the joiners to answer, and how many donors each wants at most."""
        found = [(peer, most) for peer, most in self._seek.values() if not peer.told]
        for peer, _ in found:
            del self._seek[peer.number]
        return [(peer, most) for peer, most in found if most]

    def choose(self, joiner: Peer, most: int, drawn: int) -> list[Peer]:
        """Choose the donors with the newest states, others each time, and note both ends as
        partners. ``drawn``: a number that says who goes first of those that are equally far."""
        if joiner.place is None or not joiner.schema:
            return []
        found = [
            one
            for one in self._offer.values()
            if one is not joiner and one.place and one.schema == joiner.schema and not one.behind
        ]
        if self._unreachable.concerns([joiner.number]):
            found = [one for one in found if not self._unreachable(one.number, joiner.number)]
        chosen = heapq.nsmallest(
            most, found, key=lambda one: (-one.samples, -one.round, mix(drawn ^ one.number))
        )
        for one in chosen:
            one.partners.add(joiner.number)
        joiner.partners.update(one.number for one in chosen)
        return chosen


def split(
    members: Sequence[int], unreachable: Callable[[int, int], bool], turn: Callable[[int], int]
) -> list[list[int]]:
    """Split members into as few groups as a simple rule finds, none with an unreachable pair.
    Members with the most unreachable others choose first, each the smallest group that takes it. So
    groups are of about the same size, and members that reach everybody even them out.

    ``unreachable``: whether two of them can't be in one group, whichever comes first. ``turn``: key
    of a number: orders members with equally many unreachable others. Another one each round, so
    that both ends of a pair aren't always with the same others. Returns the groups, each in rising
    order.
    """
    degree = {
        one: sum(unreachable(one, other) for other in members if other != one) for one in members
    }
    groups: list[list[int]] = []
    for one in sorted(members, key=lambda number: (-degree[number], turn(number), number)):
        takes = [
            group
            for group in groups
            if not degree[one] or not any(unreachable(one, k) for k in group)
        ]
        if takes:
            min(takes, key=len).append(one)
        else:
            groups.append([one])
    return sorted(sorted(group) for group in groups)


class UnreachablePairs:
    """Unreachable pairs, as long as they are remembered. Bounded by the peers that live."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._others: dict[int, dict[int, tuple[float, float]]] = {}
        """With whom each is in a pair: the end of the pair's unreachable time, and its length."""

    def note(self, one: int, other: int) -> None:
        """Note a pair that has found no route. Both ends may say so: that is once."""
        now = self._clock()
        until, seconds = self._others.get(one, {}).get(other, (now, 0.0))
        if now >= until:
            was_long_ago = now - until > MOST_UNREACHABLE
            seconds = FIRST_UNREACHABLE if was_long_ago else max(FIRST_UNREACHABLE, 2 * seconds)
            seconds = min(MOST_UNREACHABLE, seconds)
            self._others.setdefault(one, {})[other] = now + seconds, seconds
            self._others.setdefault(other, {})[one] = now + seconds, seconds

    def concerns(self, members: Sequence[int]) -> bool:
        """True if any of them may be in an unreachable pair. Most groups have none."""
        return any(one in self._others for one in members)

    def forget(self, number: int) -> None:
        for other in self._others.pop(number, {}):
            del self._others[other][number]
            if not self._others[other]:
                del self._others[other]

    def __call__(self, one: int, other: int) -> bool:
        until, _ = self._others.get(one, {}).get(other, (0.0, 0.0))
        return self._clock() < until


class Progress:
    """Progress of a directory's peers. ``samples``: that finished rounds have had. ``target``:
    samples after which a round is due; 0: whenever peers are ready."""

    def __init__(self) -> None:
        self.samples = 0
        self.target = 0
        self._since = 0  # samples that peers have reported since their latest rounds
        self._due_at = 0  # all samples when a round was due last
        self._behind: dict[int, Peer] = {}

    @property
    def total(self) -> int:
        return self.samples + self._since

    def report(self, peer: Peer, said: Offers, others: Iterable[Peer]) -> None:
        """A peer says how far it is. One that lies gains no more than the weight of a whole round.
        ``others``: all that have said what they average."""
        samples = min(said.samples, MOST_SAMPLES)
        if said.claims and not peer.came_back:
            self._claim(peer, samples, [one for one in others if one is not peer])
        elif peer.came_back:  # a directory that has taken over learns it from those that come
            self._go_on_from(max(self.samples, samples))
        if peer.behind and samples >= peer.behind:
            self._caught_up(peer)
        if samples < peer.samples:
            return  # said before it heard of its latest round
        peer.samples = min(samples, self.samples)
        since = min(said.since, MOST_TARGETS * self.target or MOST_SINCE)
        self._since += since - peer.since
        peer.since = since

    def _claim(self, peer: Peer, samples: int, others: Sequence[Peer]) -> None:
        """The newest state wins: those that have older ones are to take it."""
        newest = max((one.samples for one in others if not one.behind), default=0)
        if samples < newest:
            peer.behind, self._behind[peer.number] = newest, peer
            return
        self._go_on_from(samples)
        peer.samples = samples
        for one in others:
            if one.samples < samples:
                one.behind, self._behind[one.number] = samples, one

    def _go_on_from(self, samples: int) -> None:
        """These were seen before peers came here: no round is due by them."""
        self._due_at += samples - self.samples
        self.samples = samples

    def _caught_up(self, peer: Peer) -> None:
        peer.behind = 0
        self._behind.pop(peer.number, None)

    def told(self) -> list[Peer]:
        """Peers that are ready, and hear that another state is newer."""
        return [one for one in self._behind.values() if one.is_ready and not one.told]

    def falls_due(self) -> bool:
        """True if peers have seen the target since a round was due last. True once each time."""
        if not self.target or self.total - self._due_at < self.target:
            return False
        self._due_at = self.total
        return True

    def begin(self, peers: Sequence[Peer]) -> None:
        """A round of these peers begins. With a target each counts by its samples."""
        for peer in peers:
            if self.target and peer.weight:
                weight = min(peer.since, self.target) * min(1.0, MOST_WEIGHT / self.target)
                peer.weight = min(weight, MOST_WEIGHT)  # which rounding may exceed
            self._since -= peer.since
            self.samples = min(self.samples + peer.since, MOST_SAMPLES)
            peer.since = 0
        for peer in peers:
            peer.samples = self.samples

    def lost(self, peer: Peer, others: Iterable[Peer]) -> None:
        """A peer has gone, and a newer state with it, maybe. ``others``: all that have said what
        they average, and are left."""
        self._since -= peer.since
        self._behind.pop(peer.number, None)
        if not self._behind:
            return
        left = list(others)
        wanted = min(one.behind for one in self._behind.values())
        if any(one.samples >= wanted and not one.behind for one in left):
            return
        for one in list(self._behind.values()):
            self._caught_up(one)
        self._go_on_from(max((one.samples for one in left), default=0))
