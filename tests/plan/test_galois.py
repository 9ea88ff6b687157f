"""The field and the code in numpy, by their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracle.galois import encode, factors, inverse, product, restore, solve, times

ALL = np.arange(256, dtype=np.uint8)


def test_field() -> None:
    table = times(ALL[:, None], ALL[None, :])
    assert (table == table.T).all()
    assert table[2, 0x80] == 0x1D  # the polynomial
    doubled = np.where(ALL < 128, ALL.astype(int) << 1, (ALL.astype(int) << 1) ^ 0x11D)
    assert (table[2] == doubled).all()
    for a in (3, 77, 255):  # distributive, which with row 2 gives all others
        assert (table[a][ALL ^ np.uint8(a)] == table[a] ^ table[a, a]).all()
    assert (times(ALL, inverse(ALL)) == (ALL != 0)).all()


def test_first_row_and_column_are_ones() -> None:
    matrix = factors(np.arange(32), np.arange(224))
    assert (matrix[0] == 1).all()
    assert (matrix[:, 0] == 1).all()
    assert (matrix != 0).all()


@pytest.mark.parametrize(("k", "m"), [(1, 3), (5, 2), (12, 12), (64, 25), (224, 32)])
def test_any_rows_restore_as_many_packets(k: int, m: int) -> None:
    rng = np.random.default_rng(k)
    packets = rng.integers(0, 256, (k, 10), np.uint8)
    rows = encode(packets, m)
    assert (rows[0] == np.bitwise_xor.reduce(packets)).all()
    for e in (1, min(k, m)):
        missing = rng.permutation(k)[:e]
        which = rng.permutation(m)[:e]
        damaged = packets.copy()
        damaged[missing] = 255
        assert (restore(damaged, missing, rows[which], which) == packets[missing]).all()


def test_dependent_rows_are_refused() -> None:
    matrix = np.array([[1, 2], [1, 2]], np.uint8)
    with pytest.raises(ValueError, match="depends on those above"):
        solve(matrix, matrix)
    assert (product(matrix, np.array([[1], [1]], np.uint8)) == 3).all()
