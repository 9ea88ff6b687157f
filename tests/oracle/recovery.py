"""Choice of what brings back lost packets soonest: nothing, parity, resending, or both.

native/recovery.c is the same; docs/parity.md has the model. :func:`left` predicts the share that a
code leaves missing, :func:`choose` is the engine's choice for one stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.plan.sets import ROWS, SIZES, SYMBOLS_MOST, WINDOW, Code
from tests.oracle.parity import fitted

ROUNDS_MOST: Final = 3
"""The most rounds of resending that are chosen."""
NEARLY: Final = 1.1
"""Nothing is done about a loss of so much more than what is wanted, since estimates are noisy.
Where nothing is enough, what leaves so much more than the least is as good."""
KEEP: Final = (0.4, 1.25)
"""What was chosen before stays while it leaves between these multiples of what is wanted,"""
KEEP_TIME: Final = 1.3
"""and takes no more than so much longer than what is best."""
SAME_TIME: Final = 0.03
"""Of two means within this share of a stream's time, the one with fewer bytes."""
WORTH: Final = 0.125
"""Where nothing is enough, a parity packet brings back at least so much of one, or isn't sent."""
NO_LOSS: Final = 5e-5
"""Below this share nothing is lost."""
NOTHING: Final = 1e-9
"""The least share that can be asked for."""
LOSS_MOST: Final = 0.99
BURST_MOST: Final = 64.0
NO_PARITY: Final = Code()


@dataclass(frozen=True)
class Means:
    """Parity and rounds of resending that bring back a stream's lost packets."""

    code: Code = NO_PARITY  # of parity
    rounds: int = 0  # of resending
    expected: float = 0.0  # share of the data packets that will be missing
    seconds: float = 0.0  # that it adds to the stream's time


@dataclass(frozen=True)
class Ask:
    """One stream, its path, and what is wanted of it."""

    packets: int  # of the stream
    packet_bytes: int = 1448  # of each
    loss: float = 0.0  # share of packets lost on the path
    burst: float = 1.0  # mean run of lost packets
    rtt_s: float = 0.02  # round trip, seconds
    reorder_s: float = 0.001  # how long a round waits for late packets before it asks, seconds
    rate: float = 125e6  # bytes per second that the path carries; 0 if that isn't known
    row_rate: float = 30e9  # of the arithmetic, bytes per second and row
    # share of the packets that may be missing; None: a tenth of what is lost
    max_missing: float | None = 0.01
    code: Code | None = None  # what is given of parity; None: to be chosen
    rounds: int | None = None  # what is given of resending; None: to be chosen
    most: int = 64  # parity at most so many 64ths of the data, if it is chosen
    last: Means | None = None  # what was chosen before for such a stream


Numbers = NDArray[np.float64]


def _loss(loss: float) -> float:
    return min(loss, LOSS_MOST) if loss > NO_LOSS else 0.0


def _burst(burst: float, loss: float) -> float:
    """Independent losses have runs of 1 / (1 - loss)."""
    least = 1 / (1 - loss)
    return min(burst, max(BURST_MOST, least)) if burst > least else least


def _lefts(loss: float, burst: float, columns: int, sets: int, most: int) -> Iterator[float]:
    """Packets that sets of so many columns leave with 0, 1, ... ``most`` rows.

    A chain over the packets of a set, data first, of whether each is lost (Gilbert), with the
    number of those lost so far: its chance (row 0 of ``good`` and ``bad``), and the data packets
    lost times that chance (row 1). Numbers above ``most`` are left out, since what is missing on
    average is known.
    """
    leave = 1 / burst
    correlation = max(0.0, 1 - leave - loss * leave / (1 - loss))
    kept = 1.0
    for _ in range(sets):  # packets of a set are so far apart
        kept *= correlation
    begin, stay = loss * (1 - kept), loss + (1 - loss) * kept
    good, bad = np.zeros((2, most + 1)), np.zeros((2, most + 1))
    good[0, 0], bad[0, 0] = 1 - loss, loss  # of a packet before the first
    for at in range(columns + most):
        if at >= columns:
            yield _share(loss, good, bad, columns, at - columns)
        lost = np.zeros_like(bad)
        lost[:, 1:] = good[:, :-1] * begin + bad[:, :-1] * stay
        good = good * (1 - begin) + bad * (1 - stay)
        bad = lost
        if at < columns:
            bad[1] += bad[0]
    yield _share(loss, good, bad, columns, most)


def _share(loss: float, good: Numbers, bad: Numbers, columns: int, rows: int) -> float:
    """A sum in the engine's order."""
    restored = float(np.add.accumulate((good[1] + bad[1])[: rows + 1])[-1])
    return max(0.0, loss - restored / columns)


def left(loss: float, burst: float, columns: int, rows: int, sets: int = 1) -> float:
    """The share of the data packets that stays missing at this loss and mean run of lost packets.

    ``columns`` data and ``rows`` parity packets are a set, and so many sets are interleaved.
    """
    loss = _loss(loss)
    return list(_lefts(loss, _burst(burst, loss), columns, sets, rows))[-1]


@dataclass(frozen=True)
class _Sets:
    """The sets of a stream's first window, and of all."""

    columns: int
    sets: int
    of_stream: int

    @classmethod
    def of(cls, size: int, n: int) -> _Sets:
        window = -(-n // -(-n // WINDOW))
        sets = -(-window // size)
        windows = -(-n // window)
        last = -(-(n - (windows - 1) * window) // size)
        return cls(-(-window // sets), sets, (windows - 1) * sets + last)


@dataclass(frozen=True)
class _Candidate:
    means: Means
    bytes: float
    """Beyond the data, as a share of it."""
    enough: bool


class _Search:
    """All means for one stream."""

    def __init__(self, ask: Ask) -> None:
        self.ask, self.n = ask, ask.packets
        self.loss = _loss(ask.loss)
        self.burst = _burst(ask.burst, self.loss)
        wanted = self.loss / 10 if ask.max_missing is None else ask.max_missing
        self.wanted = max(wanted, NOTHING)
        self.wire = ask.packets * ask.packet_bytes / ask.rate if ask.rate > 0 else 0.0
        self.cap = min(ask.most / 64, max(0.5, 2.2 * self.loss / (1 - self.loss)))
        self.same_time = SAME_TIME * (self.wire + ask.rtt_s / 2)

    def allowed(self, parity: int) -> bool:
        return parity <= self.cap * self.n * (1 + 1e-9)

    def sizes(self) -> tuple[int, ...]:
        """No larger than the stream, but for the next one."""
        larger = (i for i, size in enumerate(SIZES) if size >= self.n)
        return SIZES[: next(larger, len(SIZES) - 1) + 1]

    def is_enough(self, code: Code, rounds: int, remains: float) -> bool:
        nothing = not code.rows and not rounds
        return remains <= self.wanted * (NEARLY if nothing else 1)

    def measure(self, code: Code, remains: float, rounds: int | None) -> _Candidate:
        """A code that leaves so much, with rounds; None: as few as are enough."""
        ask, sets = self.ask, _Sets.of(code.size, self.n).of_stream if code.rows else 0
        share = sets * code.rows / self.n
        least, most = (0, ROUNDS_MOST) if rounds is None else (rounds, rounds)
        arithmetic = 0.0
        if ask.row_rate > 0:
            arithmetic = max(code.rows - 1, 0) * (self.n * ask.packet_bytes) / ask.row_rate
        added = self.wire * share + max(0.0, arithmetic - self.wire * (1 + share))
        more, bytes_, done = 0.0, share, 0
        resent = 0.0
        while done < least or (done < most and not self.is_enough(code, done, remains)):
            any_missing = -math.expm1(self.n * math.log1p(-remains))
            more += (0 if done else ask.rtt_s / 2) + any_missing * (ask.rtt_s + ask.reorder_s)
            more += self.wire * remains
            resent += remains
            remains *= self.loss
            done += 1
        means = Means(code, done, remains, added + more)
        return _Candidate(means, bytes_ + resent, self.is_enough(code, done, remains))

    def left_by(self, code: Code) -> float:
        if not code.rows:
            return self.loss
        sets = _Sets.of(code.size, self.n)
        return left(self.loss, self.burst, sets.columns, code.rows, sets.sets)

    def of_size(self, size: int) -> Iterator[_Candidate]:
        """All codes of this size, in the order of their rows, until one is enough without a round
        more than are given."""
        sets = _Sets.of(size, self.n)
        rows = [
            row
            for row in ROWS[1:]
            if size + row <= SYMBOLS_MOST and self.allowed(sets.of_stream * row)
        ]
        if not rows:
            return
        lefts = _lefts(self.loss, self.burst, sets.columns, sets.sets, rows[-1])
        for row, remains in enumerate(lefts):
            if row in rows:
                found = self.measure(Code(size, row), remains, self.ask.rounds)
                if found.enough or self.loss - remains >= WORTH * sets.of_stream * row / self.n:
                    yield found
                if found.enough and found.means.rounds == (self.ask.rounds or 0):
                    return

    def all(self) -> list[_Candidate]:
        ask = self.ask
        if ask.code is not None:
            code = fitted(ask.code, self.n)
            return [self.measure(code, self.left_by(code), ask.rounds)]
        nothing = self.measure(NO_PARITY, self.loss, ask.rounds)
        return [nothing, *(found for size in self.sizes() for found in self.of_size(size))]

    def best(self) -> _Candidate:
        """The quickest of those that are enough, or of few bytes if that makes little difference;
        if none is enough, that which leaves the least, in the same way."""
        found = self.all()
        enough = [each for each in found if each.enough]
        if enough:
            most = min(each.means.seconds for each in enough) + self.same_time
            good = [each for each in enough if each.means.seconds <= most]
        else:
            most = min(each.means.expected for each in found) * NEARLY
            good = [each for each in found if each.means.expected <= most]
        return min(good, key=lambda each: each.bytes)

    def again(self) -> Means | None:
        """The means chosen before, if they may be chosen for this stream and are still good."""
        last, ask = self.ask.last, self.ask
        if last is None or (ask.rounds is not None and last.rounds != ask.rounds):
            return None
        if ask.code is not None:
            may = last.code == fitted(ask.code, self.n)
        else:
            sets = _Sets.of(last.code.size, self.n).of_stream if last.code.rows else 0
            may = last.code.size in (0, *self.sizes()) and self.allowed(sets * last.code.rows)
        if not may or last.rounds > (ROUNDS_MOST if ask.rounds is None else ask.rounds):
            return None
        now = self.measure(last.code, self.left_by(last.code), last.rounds).means
        return now if KEEP[0] <= now.expected / self.wanted <= KEEP[1] else None


def choose(ask: Ask) -> Means:
    """The means of least time that leave no more than is wanted; if none do, those that leave the
    least."""
    if not ask.packets:
        return Means(rounds=ask.rounds or 0)
    if ask.max_missing is not None:  # as the engine keeps it
        ask = replace(ask, max_missing=float(np.float32(ask.max_missing)))
    search = _Search(ask)
    best, again = search.best().means, search.again()
    if again and again.seconds <= best.seconds * KEEP_TIME + search.same_time:
        return again
    return best
