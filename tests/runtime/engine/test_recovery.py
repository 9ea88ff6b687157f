"""The choice of means: the engine's is that of tests/oracle/recovery.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lossycoll._native import ffi, lib

from lossycoll.plan.sets import ROWS, SIZES, SYMBOLS_MOST, Code, code_of
from tests.oracle.recovery import Ask, Means, choose, left

CODES = [Code(), *(Code(s, r) for s in SIZES for r in ROWS[1:] if s + r <= SYMBOLS_MOST)]


def asked(ask: Ask) -> Any:
    """The engine's answer."""
    native = ffi.new("lc_recovery_ask *")
    for name in ("packets", "packet_bytes", "loss", "burst", "rtt_s", "reorder_s", "rate"):
        setattr(native, name, getattr(ask, name))
    native.row_rate, native.most = ask.row_rate, ask.most
    native.max_missing = -1 if ask.max_missing is None else ask.max_missing
    native.choose = lib.LC_CHOOSE_PARITY * (ask.code is None)
    native.choose |= lib.LC_CHOOSE_ROUNDS * (ask.rounds is None)
    native.code, native.rounds = (ask.code or Code()).number, ask.rounds or 0
    if ask.last is not None:
        native.has_last = 1
        native.last.code, native.last.rounds = ask.last.code.number, ask.last.rounds
    return lib.lc_recovery_choose(native)


def drawn(rng: np.random.Generator) -> Ask:
    dial = (None, 0.0, 0.001, 0.003, 0.01, 0.03, 0.1)[rng.integers(7)]
    last = Means(CODES[rng.integers(len(CODES))], int(rng.integers(4)))
    return Ask(
        packets=int(np.exp(rng.uniform(0, 9))),
        packet_bytes=int(rng.choice([200, 1448, 8948])),
        loss=float(rng.choice([0, 1e-5, rng.uniform(0, 0.05), rng.uniform(0, 0.5), 0.9, 1.0])),
        burst=float(rng.choice([1, rng.uniform(1, 10), 100])),
        rtt_s=float(rng.choice([0.0002, 0.02, 0.1])),
        rate=float(rng.choice([0, 2.5e6, 125e6, 1.25e9])),
        row_rate=float(rng.choice([0.5e9, 4e9, 40e9])),
        max_missing=dial,
        code=CODES[rng.integers(len(CODES))] if rng.random() < 0.2 else None,
        rounds=int(rng.integers(4)) if rng.random() < 0.4 else None,
        most=int(rng.choice([16, 64])),
        last=last if rng.random() < 0.5 else None,
    )


@pytest.mark.parametrize(
    "trials", [60, pytest.param(2000, marks=[pytest.mark.long, pytest.mark.timeout(300)])]
)
def test_choices_are_those_of_python(trials: int) -> None:
    rng = np.random.default_rng(trials)
    kinds = set()
    for trial in range(trials):
        ask = drawn(rng)
        want, found = choose(ask), asked(ask)
        assert (code_of(found.code), found.rounds) == (want.code, want.rounds), (trial, ask)
        assert found.expected == pytest.approx(want.expected, rel=1e-9, abs=1e-12)
        assert found.seconds == pytest.approx(want.seconds, rel=1e-9, abs=1e-12)
        kinds.add((found.code > 0, found.rounds > 0))
    assert len(kinds) == 4  # nothing, parity, resending, both


def test_what_is_left_is_that_of_python() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        code = CODES[rng.integers(1, len(CODES))]
        how = (*rng.uniform((0, 1), (0.5, 12)), code.size, code.rows, int(rng.integers(1, 20)))
        assert lib.lc_recovery_left(*how) == pytest.approx(left(*how), rel=1e-9, abs=1e-12)
