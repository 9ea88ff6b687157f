"""What arrivals of packets say: loss and order, the rate that passes, and what limits it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Final

WINDOW: Final = 100
"""Packets over which loss is looked at, to find where a burst ends."""
OFTEN: Final = 0.1
"""Share of a window that is lost where a limit is reached."""
QUEUED: Final = 0.3
"""A queue of this share of what was sent too fast is no policer."""
DROPS: Final = 0.2
"""Share of the rest that a policer drops at least. Less may be the path's own loss, in bursts."""
NO_QUEUE_MS: Final = 1.0
NEAR: Final = 20
LOSSY: Final = 0.001
"""Share of lost packets that is worth a word."""
LOSSY_ADVICE: Final = (
    "training needs a method that brings packets back (lossycoll.DriftBound, LOSSYCOLL_REPAIR=2 or "
    "LOSSYCOLL_FEC=auto)"
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A packet. ``sent`` and ``came`` in ns, of two clocks; ``size`` without headers."""

    number: int
    sent: int
    came: int
    size: int


@dataclass(frozen=True, slots=True)
class Flow:
    """Packets at a modest pace. Shares of what was sent; ``run``: the longest one of lost ones."""

    sent: float
    lost: float
    late: float
    doubled: float
    run: float


@dataclass(frozen=True, slots=True)
class Rate:
    """Packets as fast as they go. Rates in Mbit/s of UDP's data."""

    sent: float  # the sender's rate
    got: float  # what passes for long
    lost: float  # share of the packets
    burst: float = 0  # bytes that pass before the limit shows; 0: it doesn't
    queue_ms: float = 0.0  # what delay grows by until then
    limit: str = "none"  # of ``LIMITS``: what it is that lets no more pass


LIMITS: Final = ("none", "queue", "policer", "receiver")


def flow_of(arrivals: Sequence[Arrival], sent: int) -> Flow:
    order = [one.number for one in arrivals]
    seen = set(order)
    late = sum(each < top for each, top in zip(order, accumulate(order, max), strict=True))
    runs = groupby(range(sent), seen.__contains__)
    longest = max((len(list(run)) for came, run in runs if not came), default=0)
    all_sent = max(sent, 1)
    doubled = len(order) - len(seen)
    return Flow(sent, 1 - len(seen) / all_sent, late / all_sent, doubled / all_sent, longest)


def rate_of(
    arrivals: Sequence[Arrival], sent: int, seconds: float, lost_anyway: float = 0.0
) -> Rate:
    """Rate that passes, and its limit; ``lost_anyway``: the loss at a modest pace.

    A queue delays what comes too fast until it is full; a policer lets a burst pass without delay
    and drops the rest.
    """
    if len(arrivals) < 2 * NEAR:
        return Rate(0.0, 0.0, lost=1 - len(arrivals) / max(sent, 1))
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
        limit = "queue" if got < 0.8 * speed and growth > 0.2 * span * 1e9 else "none"
        return Rate(_mbit(speed), _mbit(min(got, speed)), lost, 0, growth / 1e6, limit)
    passed = len(rest) * size / max((rest[-1].came - rest[0].came) / 1e9, 1e-3)
    before = [one for one in arrivals if one.number < end][-NEAR:] or rest[:NEAR]
    growth = statistics.median(one.came - one.sent for one in before) - base
    burst = end * size
    too_much = burst * max(0.0, 1 - passed / speed)
    is_policed = growth / 1e9 < QUEUED * too_much / passed
    dropped = 1 - len(rest) / max(1, sent - rest[0].number)
    if dropped < DROPS and (is_policed or growth / 1e6 < NO_QUEUE_MS):
        return Rate(_mbit(speed), _mbit(min(passed, speed)), lost, 0, growth / 1e6)
    limit = "policer" if is_policed else "queue"
    if is_policed:  # a bucket is filled again while it is emptied, for longer on a busy machine
        last = max((one.came for one in arrivals if one.number < end), default=arrivals[0].came)
        burst = max(size, burst - int(passed * (last - arrivals[0].came) / 1e9))
        passed = _refilling(rest, burst, passed)
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


def _refilling(arrivals: Sequence[Arrival], burst: int, passed: float) -> float:
    """Rate, bytes a second, at which a bucket of ``burst`` bytes fills, from what passes a policer.

    A bucket that is full fills no more: of a pause of the sender, only the time that an empty one
    needs counts. ``passed``: the rate with all pauses.
    """
    gaps = [(b.sent - a.sent) / 1e9 for a, b in pairwise(arrivals)]
    nbytes = sum(one.size for one in arrivals)
    for _ in range(NEAR):
        counted = sum(min(gap, burst / passed) for gap in gaps)
        if counted <= 0 or nbytes / counted <= passed * 1.001:
            break
        passed = nbytes / counted
    return passed


def _mbit(rate: float) -> float:
    return rate * 8 / 1e6
