"""Who averages with whom: rows of a grid, and where peers sit afterwards."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from lossycoll.plan.grid import Cells, Grid, fitting, parse, placed

SHAPES = [(4, 4), (2, 2, 2), (8,), (3, 5), (5, 1, 3), (2, 3, 4, 2)]


def some(grid: Grid, share: float, seed: int = 1) -> Cells:
    peers = max(1, int(grid.cells * share))
    return placed(peers, grid, np.random.default_rng(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_a_group_has_those_that_differ_in_the_rounds_axis_alone(
    shape: tuple[int, ...], share: float
) -> None:
    grid = Grid(shape)
    cells = some(grid, share)
    places = np.stack(np.unravel_index(cells, shape), axis=1)
    for number in range(2 * len(shape)):
        axis = number % len(shape)
        groups = grid.groups(cells, number)
        assert sorted(np.concatenate(groups)) == list(range(len(cells)))
        group_of = {peer: k for k, group in enumerate(groups) for peer in group}
        for a, b in itertools.combinations(range(len(cells)), 2):
            alike = np.delete(places[a], axis).tolist() == np.delete(places[b], axis).tolist()
            assert alike == (group_of[a] == group_of[b])
        for group in groups:
            assert len(group) <= shape[axis]
            along = places[group, axis].tolist()
            assert along == sorted(along)
            assert along == grid.coordinate(cells[group], axis).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_full_grid_has_the_exact_mean_after_as_many_rounds_as_axes(
    shape: tuple[int, ...],
) -> None:
    grid = Grid(shape)
    for moves in (False, True):
        cells = some(grid, 1.0)
        values = np.random.default_rng(2).standard_normal(grid.cells)
        mean = values.mean()
        for number in range(len(shape)):
            for group in grid.groups(cells, number):
                values[group] = values[group].mean()
            cells = grid.moved(cells, number, seed=5) if moves else cells
        np.testing.assert_allclose(values, mean, rtol=0, atol=1e-14)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_peers_of_one_group_meet_others_next(shape: tuple[int, ...], share: float) -> None:
    """They stay on their row, in places of their own."""
    grid = Grid(shape)
    cells = some(grid, share)
    for number in range(3 * len(shape)):
        moved = grid.moved(cells, number, seed=7)
        axis = grid.axis(number)
        assert (grid.row(moved, axis) == grid.row(cells, axis)).all()
        assert len(set(moved.tolist())) == len(cells)
        if len(shape) > 1:
            together = grid.groups(moved, number + 1)
            for group in grid.groups(cells, number):
                assert all(len(set(group) & set(other)) <= 1 for other in together)
        cells = moved


def test_places_are_dealt_anew_in_each_round_and_by_each_seed() -> None:
    grid = Grid((16, 16))
    cells = some(grid, 0.5)
    dealt = [grid.moved(cells, number, seed) for number in (0, 2, 4) for seed in (1, 2)]
    assert len({tuple(one.tolist()) for one in dealt}) == len(dealt)
    again = grid.moved(cells, 0, 1)
    assert (again == dealt[0]).all()
    # Each place of a row is as likely as any other.
    counts = np.zeros(16)
    for seed in range(2000):
        counts += np.bincount(grid.coordinate(grid.moved(cells, 0, seed), 0), minlength=16)
    expected = 2000 * len(cells) / 16
    assert np.abs(counts - expected).max() < 5 * math.sqrt(expected)


def test_what_one_knows_of_a_row_is_enough() -> None:
    """A peer that sees its own row alone deals as one that sees the grid."""
    grid = Grid((6, 7, 5))
    cells = some(grid, 0.6)
    for number in range(3):
        moved = grid.moved(cells, number, seed=9)
        for group in grid.groups(cells, number):
            assert (grid.moved(cells[group], number, seed=9) == moved[group]).all()


@pytest.mark.parametrize("most", [2, 3, 8, 32])
def test_a_grid_fits_its_peers(most: int) -> None:
    for peers in (1, 2, 3, 5, 8, 9, 16, 17, 31, 32, 33, 100, 900, 1024, 1025):
        grid = fitting(peers, most)
        assert grid.cells >= peers
        assert max(grid.shape) <= most
        assert most ** (len(grid.shape) - 1) < peers or len(grid.shape) == 1
        shorter = (
            math.prod(grid.shape) // length * (length - 1) for length in grid.shape if length > 1
        )
        assert all(cells < peers for cells in shorter)
    assert str(fitting(900, 32)) == "30x30"


def test_texts() -> None:
    for text in ("32x32", "8", "2x2x2"):
        assert str(parse(text)) == text
    for text in ("", "x", "3x", "3y3", "-3x3", "3.5", "1" * 13):
        with pytest.raises(ValueError, match="as in 32x32"):
            parse(text)


def test_grids_that_cannot_be() -> None:
    for shape in ((), (0,), (3, 0), (1 << 21, 1 << 20)):
        with pytest.raises(ValueError, match="at least one axis, each at least 1 long"):
            Grid(shape)
    with pytest.raises(ValueError, match="10 peers don't fit into 3x3, which has 9 cells"):
        placed(10, Grid((3, 3)), np.random.default_rng(0))
    for peers, most in ((0, 4), (4, 1)):
        with pytest.raises(ValueError, match="wanted at least 1, and 2"):
            fitting(peers, most)


def test_nobody_is_in_no_group() -> None:
    nobody = np.zeros(0, np.int64)
    assert Grid((4, 4)).groups(nobody, 0) == []
    assert len(Grid((4, 4)).moved(nobody, 0, 1)) == 0
