"""What a train's arrivals say of the path: pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .packets import Arrival

WINDOW: Final = 100
"""Packets over which loss is looked at, to find where a burst ends."""
OFTEN: Final = 0.1
"""Share of a window that is lost where a limit is reached."""
QUEUED: Final = 0.3
"""A queue of this share of what was sent too fast is no policer."""
NEAR: Final = 20
LIMITS: Final = ("none", "queue", "policer", "receiver")


@dataclass(frozen=True, slots=True)
class Flow:
    """Packets at a modest pace. Shares of what was sent; ``run``: the longest one of lost ones."""

    sent: int
    lost: float
    late: float
    doubled: float
    run: int


@dataclass(frozen=True, slots=True)
class Rate:
    """Packets as fast as they go. Rates in Mbit/s of UDP's data.

    Attributes:
        sent: The sender's rate.
        got: What passes for long.
        lost: Share of the packets.
        burst: Bytes that pass before the limit shows; 0: it doesn't.
        queue_ms: What delay grows by until then.
        limit: Of ``LIMITS``: what it is that lets no more pass.
    """

    sent: float
    got: float
    lost: float
    burst: int
    queue_ms: float
    limit: str


def flow_of(arrivals: Sequence[Arrival], sent: int) -> Flow:
    """Loss, order and doubles."""
    numbers = [one.number for one in arrivals]
    seen = set(numbers)
    late, top = 0, -1
    for number in numbers:
        late += number < top
        top = max(top, number)
    longest = run = 0
    for number in range(sent):
        run = 0 if number in seen else run + 1
        longest = max(longest, run)
    all_sent = max(sent, 1)
    doubled = len(numbers) - len(seen)
    return Flow(sent, 1 - len(seen) / all_sent, late / all_sent, doubled / all_sent, longest)


def rate_of(
    arrivals: Sequence[Arrival], sent: int, seconds: float, lost_anyway: float = 0.0
) -> Rate:
    """How much passes, and what limits it; ``lost_anyway``: the loss at a modest pace.

    A queue delays what comes too fast until it is full; a policer lets a burst pass without delay
    and drops the rest.
    """
    if len(arrivals) < 2 * NEAR:
        return Rate(0.0, 0.0, 1 - len(arrivals) / max(sent, 1), 0, 0.0, "none")
    size = arrivals[0].size
    speed = sent * size / max(seconds, 1e-3)
    seen = {one.number for one in arrivals}
    lost = 1 - len(seen) / max(sent, 1)
    end = _end_of_burst(seen, sent, max(OFTEN, 3 * lost_anyway))
    rest = [one for one in arrivals if one.number >= end + WINDOW]
    rest = rest if len(rest) >= NEAR else [one for one in arrivals if one.number >= end]
    base = min(one.came - one.sent for one in arrivals)
    if end >= sent or len(rest) < NEAR:
        growth = statistics.median(one.came - one.sent for one in arrivals[-NEAR:]) - base
        span = (arrivals[-1].came - arrivals[0].came) / 1e9
        got = len(arrivals) * size / max(span, 1e-3)
        is_queued = got < 0.8 * speed and growth > 0.2 * span * 1e9
        return Rate(
            _mbit(speed),
            _mbit(min(got, speed)),
            lost,
            0,
            growth / 1e6,
            "queue" if is_queued else "none",
        )
    passed = len(rest) * size / max((rest[-1].came - rest[0].came) / 1e9, 1e-3)
    before = [one for one in arrivals if one.number < end][-NEAR:] or rest[:NEAR]
    growth = statistics.median(one.came - one.sent for one in before) - base
    burst = end * size
    too_much = burst * max(0.0, 1 - passed / speed)
    is_policed = growth / 1e9 < QUEUED * too_much / passed
    limit = "policer" if is_policed else "queue"
    if is_policed:  # a bucket is filled again while it is emptied, for longer on a busy machine
        last = max((one.came for one in arrivals if one.number < end), default=arrivals[0].came)
        burst = max(size, burst - int(passed * (last - arrivals[0].came) / 1e9))
    return Rate(_mbit(speed), _mbit(passed), lost, burst, growth / 1e6, limit)


def _end_of_burst(seen: set[int], sent: int, often: float) -> int:
    """The first packet from which on more than that share is lost; ``sent``: there is none."""
    missing = [number not in seen for number in range(sent)]
    lost = sum(missing[:WINDOW])
    for begin in range(max(0, sent - WINDOW)):
        if missing[begin] and lost > often * WINDOW:
            dense = (one for one in range(begin, begin + WINDOW) if missing[one])
            return next((one for one in dense if sum(missing[one : one + 10]) >= 5), begin)
        lost += missing[begin + WINDOW] - missing[begin]
    return sent


def _mbit(rate: float) -> float:
    return rate * 8 / 1e6
