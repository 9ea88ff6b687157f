"""Peers, as the directory knows them, and their placement in the cells of a grid. It is indexed by
cell: a lookup takes as long in a swarm of thousands as in one of a few."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from lossycoll.errors import OptionError
from lossycoll.plan.grid import Cells, Grid, fitting, parse
from lossycoll.runtime.control.schema import Address

from .protocol import MOST_MEMBERS, Averages, Here, Member

MOST_CELLS: Final = 1 << 16
DRAWS: Final = 16  # draws of a newcomer's cell before it gets the next free one
KNOWN: Final = 16  # rounds that it is learnt from how long peers take


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
        if self._follows([peer]):
            return True
        cells = self.grid.cells
        cell = draw(0) % cells
        for turn in range(1, DRAWS):
            if cell not in self._at:
                break
            cell = draw(turn) % cells
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
        return self._follows([])

    def _follows(self, come: Sequence[Peer]) -> bool:
        """Where the grid follows the peers: a new one if they don't fit, or if half the cells or
        fewer axes would do. Then all are placed anew."""
        count = max(1, len(self._at) + len(come))
        if self.fixed:
            return False
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
