"""Grid of a swarm: peers sit in its cells, and each round averages
along one of its axes.

Peers whose cells differ in that axis alone are a group; the next round takes the next axis. A grid
without an empty cell has the exact mean in all cells after as many rounds as it has axes. Source:
Ryabinin et al., "Moshpit SGD: Communication-Efficient Decentralized Training on Heterogeneous
Unreliable Devices", NeurIPS 2021, section 3.1. Rounds count from 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .rng import key_of, mix_array

Cells = NDArray[np.int64]
"""A cell of each peer, shape (peers,): numbers in row-major order, all different."""

_Cells = TypeVar("_Cells", int, Cells)
MOST_CELLS = 1 << 40


@dataclass(frozen=True)
class Grid:
    """A grid of cells; ``shape`` is the length of each axis, at least 1. No group is larger than
    the axis of its round."""

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1 or self.cells > MOST_CELLS:
            raise ValueError(
                f"a grid of {self}: wanted at least one axis, each at least 1 long, and at most "
                f"2^40 cells"
            )

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def cells(self) -> int:
        return math.prod(self.shape)

    def axis(self, number: int) -> int:
        return number % len(self.shape)

    def coordinate(self, cells: Cells, axis: int) -> Cells:
        found: Cells = cells // self._stride(axis) % self.shape[axis]
        return found

    def row(self, cells: _Cells, axis: int) -> _Cells:
        """The number of the row along ``axis`` through each cell: that of its first cell."""
        stride = self._stride(axis)
        return cells - cells // stride % self.shape[axis] * stride

    def on(self, first: int, axis: int) -> range:
        """The cells along ``axis`` of the row through ``first``, in order."""
        stride = self._stride(axis)
        return range(first, first + stride * self.shape[axis], stride)

    def groups(self, cells: Cells, number: int) -> list[NDArray[np.intp]]:
        """The peers that average together in a round: by row, their positions in ``cells``, in
        order of their place on the row."""
        rows = self.row(cells, self.axis(number))
        order = np.lexsort((cells, rows))
        starts = np.flatnonzero(np.diff(rows[order])) + 1
        return np.split(order, starts) if len(cells) else []

    def moved(self, cells: Cells, number: int, seed: int) -> Cells:
        """Cells of peers after a round by the paper's rule: each at the place on its row that is
        the number of the chunk which it reduced.

        Chunks are dealt anew in each round, so that two peers of a group meet different ones next,
        and the empty places of a row change. All who know the peers of a row deal alike.
        """
        axis = self.axis(number)
        out: Cells = cells.copy()
        for group in self.groups(cells, number):
            row = int(self.row(cells[group[:1]], axis)[0])
            places = np.arange(self.shape[axis], dtype=np.uint64)
            drawn = mix_array(places ^ np.uint64(key_of(seed, number, row)))
            dealt = np.argsort(drawn, kind="stable")[: len(group)]
            out[group] = row + dealt * self._stride(axis)
        return out

    def _stride(self, axis: int) -> int:
        return math.prod(self.shape[axis + 1 :])


def parse(text: str) -> Grid:
    """The grid of a text such as ``32x32``; else ValueError."""
    parts = text.split("x")
    if not all(part.isdecimal() and len(part) <= 12 for part in parts):
        raise ValueError(f"{text!r} is no grid; as in 32x32")
    return Grid(tuple(map(int, parts)))


def fitting(peers: int, most: int) -> Grid:
    """The grid with the fewest axes, and then the fewest cells, for some number of peers. ``most``
    peers, at least 2, are in a group."""
    if peers < 1 or most < 2:
        raise ValueError(f"{peers} peers in groups of {most}: wanted at least 1, and 2")
    axes = 1
    while most**axes < peers:
        axes += 1
    side = 1
    while side**axes < peers:
        side += 1
    shape = [side] * axes
    for axis in range(axes):  # an axis that can be shorter
        while math.prod(shape) // shape[axis] * (shape[axis] - 1) >= peers:
            shape[axis] -= 1
    return Grid(tuple(shape))


def placed(peers: int, grid: Grid, generator: np.random.Generator) -> Cells:
    """Different cells at random; ValueError if there are more peers than cells."""
    if peers > grid.cells:
        raise ValueError(f"{peers} peers don't fit into {grid}, which has {grid.cells} cells")
    return generator.choice(grid.cells, size=peers, replace=False).astype(np.int64)
