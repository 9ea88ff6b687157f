"""Sets and codes in numpy, as docs/parity.md defines them."""

from __future__ import annotations

import numpy as np
import pytest

from lossycoll.plan.sets import ROWS, SIZES, SYMBOLS_MOST, Code, code_of_share
from tests.oracle.parity import fitted, shape_of

CODES = [Code(size, rows) for size in SIZES for rows in ROWS[1:] if size + rows <= SYMBOLS_MOST]


@pytest.mark.parametrize("wrong", [(5, 1), (4, 32), (224, 33), (4, 0), (0, 1), (4, -1)])
def test_other_codes_are_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no code has sets of"):
        Code(*wrong)


@pytest.mark.parametrize("n", [1, 2, 5, 63, 64, 65, 300, 1024, 1025, 2979])
def test_every_set_has_its_rows(n: int) -> None:
    for code in CODES[:: 97 if n > 100 else 13]:
        shape = shape_of(code, n)
        assert np.bincount(shape.of_data).max() <= code.size
        assert np.bincount(shape.of_data).min() >= 1
        assert set(np.bincount(shape.of_parity)) == {code.rows}


def test_a_burst_costs_each_set_one_packet() -> None:
    """993 packets a window, 16 sets each."""
    of_data = shape_of(Code(64, 6), 2979).of_data
    for first in range(0, 2979 - 16, 7):
        assert len(set(of_data[first : first + 16])) == 16


def test_any_rows_bring_back_as_many_packets() -> None:
    rng = np.random.default_rng(1)
    for n, code in ((1, Code(1, 2)), (40, Code(12, 3)), (1500, Code(64, 25))):
        shape = shape_of(code, n)
        for loss in (0.1, 0.3):
            missing, came = rng.random(n) < loss, rng.random(len(shape.of_parity)) >= loss
            void = missing & (rng.random(n) < 0.1)
            back = shape.recover(missing, void, came)
            for s in range(int(shape.of_data.max()) + 1):
                here = shape.of_data == s
                enough = missing[here].sum() <= came[shape.of_parity == s].sum()
                want = missing[here] & ~void[here] if enough else np.zeros(here.sum(), bool)
                assert (back[here] == want).all()


def test_nothing_comes_back_without_parity() -> None:
    missing = np.ones(10, bool)
    assert not shape_of(Code(), 10).recover(missing, ~missing, missing[:0]).any()
    assert len(shape_of(Code(4, 1), 0).of_parity) == 0


@pytest.mark.parametrize(
    ("share", "code"),
    [
        *((0, Code()), (0.001, Code(224, 1)), (0.01, Code(96, 1)), (1 / 64, Code(64, 1))),
        *((0.1, Code(64, 6)), (0.25, Code(64, 16)), (0.4, Code(64, 26)), (1, Code(64, 64))),
    ],
)
def test_share(share: float, code: Code) -> None:
    assert code_of_share(share) == code


def test_short_streams_get_the_same_share() -> None:
    assert fitted(Code(64, 6), 20) == Code(24, 2)
    assert fitted(Code(64, 6), 3) == Code(3, 1)
    assert fitted(Code(64, 6), 64) == Code(64, 6)
    assert fitted(Code(64, 6), 65) == Code(64, 3)
    assert fitted(Code(64, 6), 0) == fitted(Code(), 9) == Code()
    for code in CODES:
        for n in (1, 2, 7, 30, 100, 223):
            parity = len(shape_of(fitted(code, n), n).of_parity)
            sets, share = -(-n // code.size), code.rows / code.size
            assert parity == sets or abs(parity / n - share) <= (3 + share) * sets / n
