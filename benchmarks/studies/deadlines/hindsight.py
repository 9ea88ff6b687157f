"""What a fixed deadline would have given up and waited, over streams that were recorded.

A fixed deadline D counts from a stream's first packet, so that a rank that is late costs it
nothing. A stream is over when all of its packets are there, or at D. What it waits is the time from
its first packet to its end. Packets are taken to have come evenly between the first and the last,
but for the longest silence, which is put in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stream:
    """Times in seconds since its first packet: of the last one (``took``), of the longest silence
    (``gap``), of its end (``ended``). ``late``: packets that came after that."""

    packets: int
    arrived: int
    took: float
    gap: float
    ended: float
    late: int = 0

    @property
    def complete(self) -> bool:
        return self.arrived == self.packets

    def waited(self, deadline: float) -> float:
        return min(self.took, deadline) if self.complete else deadline

    def given_up(self, deadline: float) -> float:
        """Packets that came, or were to come, after the deadline."""
        late = self.late if deadline < self.ended else 0
        if self.took <= deadline:
            return late
        moving = self.took - self.gap
        before = min(deadline, moving / 2)
        after = max(0.0, deadline - moving / 2 - self.gap)
        share = (before + after) / moving if moving > 0 else 0.0
        return late + (self.arrived - 1) * (1 - share)


@dataclass(frozen=True)
class Outcome:
    """``given_up``: packets that the network did deliver. ``waited``: seconds, of all streams."""

    deadline: float
    given_up: float
    waited: float


def fixed(streams: Sequence[Stream], deadline: float) -> Outcome:
    """With one deadline for all."""
    return Outcome(
        deadline,
        sum(stream.given_up(deadline) for stream in streams),
        sum(stream.waited(deadline) for stream in streams),
    )


def learnt(streams: Sequence[Stream]) -> Outcome:
    """As it was."""
    return Outcome(
        0.0, float(sum(stream.late for stream in streams)), sum(stream.ended for stream in streams)
    )


def best(streams: Sequence[Stream], given_up: float) -> Outcome:
    """The shortest deadline that gives up no more than that: both what it gives up and what it
    waits only ever go one way. Raises ValueError without streams."""
    if not streams:
        raise ValueError("no deadline is best for no streams")
    times = sorted({stream.took for stream in streams} | {stream.ended for stream in streams})
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if fixed(streams, times[middle]).given_up <= given_up:
            high = middle
        else:
            low = middle + 1
    return fixed(streams, times[low])


def as_long(streams: Sequence[Stream], waited: float) -> Outcome:
    """The longest deadline, to a millionth of the longest stream, that waits no more than that."""
    low, high = 0.0, max(stream.ended for stream in streams)
    for _ in range(20):
        middle = (low + high) / 2
        if fixed(streams, middle).waited <= waited:
            low = middle
        else:
            high = middle
    return fixed(streams, low)
