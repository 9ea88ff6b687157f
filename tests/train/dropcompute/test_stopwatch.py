"""A stopwatch whose clock jumps."""

from __future__ import annotations

import math

from lossycoll.train.dropcompute.loop import Stopwatch
from tests.support.dropcompute_cases import Clock


def test_a_clock_that_jumps() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    assert watch.start() is None
    clock.now += 2
    assert watch.lap() == 2
    clock.now -= 50
    assert (watch.lap(), watch.elapsed, watch.jumps) == (0, 2, 1)
    clock.now += 3
    assert (watch.lap(), watch.elapsed) == (3, 5)
    now, clock.now = clock.now, math.nan
    assert (watch.lap(), watch.jumps) == (0, 2)
    clock.now = now + 4
    assert watch.lap() == 4
    assert watch.start() is None  # it has gone back since the last start
    clock.now += 7
    assert watch.start() == 7
    clock.now -= 1000
    assert watch.start() is None
    clock.now = math.inf
    assert (watch.lap(), watch.elapsed, watch.jumps) == (0, 0, 3)


def test_the_gpu_is_waited_for_before_the_clock_is_read() -> None:
    order: list[str] = []
    watch = Stopwatch(lambda: order.append("read") or 0.0, lambda: order.append("synchronized"))  # type: ignore[func-returns-value]
    watch.start()
    watch.lap()
    assert order == ["synchronized", "read"] * 2
