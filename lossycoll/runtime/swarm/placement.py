"""Placement of peers in the cells of a grid, indexed by cell: a lookup takes as long in a swarm of
thousands as in one of a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from lossycoll.errors import OptionError
from lossycoll.plan.grid import Cells, Grid, fitting, parse

from .peer import Peer
from .protocol import MOST_MEMBERS

MOST_CELLS: Final = 1 << 16
DRAWS: Final = 16  # draws of a newcomer's cell before it gets the next free one


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
        return GridRow(axis, self.grid.first(cell, axis))

    def rows_of(self, cell: int) -> list[GridRow]:
        return [self.row_of(cell, axis) for axis in range(len(self.grid.shape))]

    def on(self, row: GridRow) -> list[Peer]:
        """Return the peers on a row, in order of the cells."""
        cells = self.grid.on(row.first, row.axis)
        if len(cells) <= len(self._at):
            return [self._at[cell] for cell in cells if cell in self._at]
        return [self._at[cell] for cell in sorted(self._at) if cell in cells]


def _too_long(grid: Grid) -> str:
    """Why no groups can be formed on a grid; "": they can."""
    if max(grid.shape) <= MOST_MEMBERS:
        return ""
    return f"a grid of {grid} has rows of more than {MOST_MEMBERS} cells: no group is larger"
