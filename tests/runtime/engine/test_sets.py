"""Sets, codes and rows of parity: the engine's are those of numpy."""

from __future__ import annotations

import numpy as np
import pytest
from lossycoll._native import ffi, lib

from lossycoll.plan.sets import ROWS, SIZES, SYMBOLS_MOST, Code, code_of
from tests.oracle import galois
from tests.oracle.parity import shape_of

NONE = 0xFFFFFFFF
CODES = [Code(size, rows) for size in SIZES for rows in ROWS[1:] if size + rows <= SYMBOLS_MOST]


def test_codes_are_those_of_the_engine() -> None:
    numbers = {code.number for code in CODES}
    assert len(numbers) == len(CODES)
    assert [code_of(code.number) for code in CODES] == CODES
    for number in range(1 << 11):
        known = lib.lc_parity_packets(number, 1) != NONE
        assert known == (number in numbers or number == 0), number
    assert code_of(0) == Code()


@pytest.mark.parametrize("n", [1, 2, 5, 63, 64, 65, 300, 1024, 1025, 2979])
def test_sets_are_those_of_the_engine(n: int) -> None:
    for code in CODES[:: 97 if n > 100 else 13]:
        shape = shape_of(code, n)
        assert len(shape.of_parity) == lib.lc_parity_packets(code.number, n)
        step = 1 + n // 50
        for packet in range(0, n, step):
            assert shape.of_data[packet] == lib.lc_set_of(code.number, n, packet)
        for j in range(0, len(shape.of_parity), step):
            assert shape.of_parity[j] == lib.lc_set_of(code.number, n, n + j)
        assert lib.lc_set_of(code.number, n, n + len(shape.of_parity)) == NONE


@pytest.mark.parametrize("simd", [0, 1])
@pytest.mark.parametrize(("k", "m"), [(1, 1), (5, 3), (64, 26), (224, 32), (128, 127)])
def test_rows_are_those_of_the_engine(simd: int, k: int, m: int) -> None:
    packets = np.random.default_rng(m).integers(0, 256, (k, 75), np.uint8)
    rows = np.empty((m, 75), np.uint8)
    pointers = (ffi.from_buffer("uint8_t[]", each) for each in (packets, rows))
    assert lib.lc_parity_rows(simd, k, m, 75, *pointers) == 0
    assert (rows == galois.encode(packets, m)).all()


def test_rows_of_no_code_are_refused() -> None:
    assert lib.lc_parity_rows(0, 200, 57, 0, ffi.NULL, ffi.NULL) == lib.LC_E_ARGUMENT
