"""The map of parity against resending says what the engine's model says of a stream."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks.theory import crossover
from tests.oracle.recovery import Ask

TRIPS = [1e-4, 1e-3, 1e-2, 1e-1]


def test_resending_pays_on_short_paths_and_parity_on_long_ones() -> None:
    found = crossover.times(3000, 0.2, 1.0, TRIPS)
    assert found == sorted(found)
    assert found[0] < 1 < found[-1]
    at = crossover.crossover(found, TRIPS)
    assert at in TRIPS[1:]
    # The times are those of a stream whose means are chosen at that round trip.
    ask = Ask(3000, loss=0.2, burst=1.0, rtt_s=TRIPS[-1])
    resent, coded = (crossover.alone(ask, parity=one) for one in (False, True))
    assert found[-1] == pytest.approx(resent.seconds / coded.seconds)
    assert resent.rounds > 0 == coded.rounds
    assert coded.code.rows > 0 == resent.code.rows
    assert crossover.enough(resent, ask)
    assert crossover.enough(coded, ask)


def test_where_parity_leaves_too_much_there_is_no_time() -> None:
    assert all(math.isnan(one) for one in crossover.times(24, 0.2, 8.0, TRIPS))
    assert crossover.crossover([math.nan] * 4, TRIPS) is None


def test_the_picture_and_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = {
        (packets, burst, loss): [math.nan if burst > 1 else trip / 0.01 for trip in TRIPS]
        for packets in crossover.STREAMS
        for burst in crossover.BURSTS
        for loss in crossover.LOSSES
    }
    import numpy as np

    monkeypatch.setattr(crossover, "ROUND_TRIPS", np.array(TRIPS))
    crossover.draw(found, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 0
    line = crossover.table(found).splitlines()[2]
    assert line.startswith("| 1.5% | 10 | never: too much is left |")
