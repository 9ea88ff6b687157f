"""All-reduce in few bits: the limit it is held against, and which operations count."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.micro import wires
from tests.support.lab_kit import needs_lab


def options(**changes: float) -> argparse.Namespace:
    given = {"mib": 25.0, "mbit": 1000.0, "delay_ms": 0.1, "rounds": 1, "each": 3}
    return argparse.Namespace(**{**given, **changes})


def test_the_limit_is_of_the_bytes_that_were_sent() -> None:
    assert wires.limit(options(), 12.5e6) == pytest.approx(0.1002)
    assert wires.limit(options(mbit=500.0, delay_ms=10.0), 12.5e6) == pytest.approx(0.22)


def test_the_first_of_a_row_are_not_counted() -> None:
    rows = [("a", 0, 9.0), ("a", 1, 1.0), ("b", 0, 7.0), ("b", 1, 3.0)]
    first = [{"wire": w, "nth": n, "time": (0.0, t), "sent": 5} for w, n, t in rows]
    second = [{**row, "sent": 7} for row in first]
    assert wires.of_wire("a", [first, second], 1) == wires.Measured("a", [1.0], 7)
    table = wires.cells(options(), [wires.of_wire(w, [first, second], 1) for w in "ab"])
    assert [row[0] for row in table] == ["a", "b"]
    assert [row[-1] for row in table] == ["1.00", "0.33"]
    assert len(table[0]) == len(wires.HEADINGS)


@pytest.mark.long
@needs_lab
def test_fewer_bytes_take_less_time() -> None:
    chosen = {name: wires.WIRES[name] for name in ("float32", "int8", "int4")}
    found = wires.measure(options(mib=4.0, mbit=200.0), chosen)
    assert [len(one.seconds) for one in found] == [2, 2, 2]
    sent = [one.sent for one in found]
    assert sent[0] > 3.5 * sent[1] > 6 * sent[2]
    times = [min(one.seconds) for one in found]
    assert times[0] > times[1] > times[2]
    assert times[0] >= wires.limit(options(mib=4.0, mbit=200.0), 4 * (1 << 20))
