"""Which packets of a link are lost, as a fixed sequence that repeats.

The kernel's packet filter can count but has no memory of what it did to the last packet, and its
sets forget; so the runs of a channel with bursts are drawn beforehand, and looked up by number.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

from .network import Link
from .switch_memory import chances

RUNS: Final = 2000
"""Of lost packets, before the sequence repeats."""
PERIOD_MAX: Final = 1 << 31


@dataclass(frozen=True)
class Pattern:
    """``runs``: (first, last) packets lost in a row, ascending, of every ``period`` packets."""

    period: int
    runs: tuple[tuple[int, int], ...]

    @property
    def lost(self) -> int:
        return sum(last - first + 1 for first, last in self.runs)


def draw(link: Link, seed: int, pair: tuple[int, int]) -> Pattern:
    """The sequence of a link: runs and gaps of a two-state chain, with the link's share of loss.

    Runs are geometric, and so are the gaps, scaled so that the share is the one that was asked for.
    """
    if link.loss <= 0:
        return Pattern(1, ())
    if link.loss >= 1:
        return Pattern(1, ((0, 0),))
    begin, go_on = chances(link)
    rng = random.Random(f"{seed} {pair[0]} {pair[1]}")
    runs = [_geometric(rng, 1 - go_on) for _ in range(RUNS)]
    gaps = [_geometric(rng, begin) for _ in range(RUNS)]
    period = min(round(sum(runs) / link.loss), PERIOD_MAX)
    # One packet at least between two runs, or they would be one.
    scale = max(0.0, (period - sum(runs) - RUNS) / max(1, sum(gaps) - RUNS))
    at, ideal, out = 0, 0.0, []
    for run, gap in zip(runs, gaps, strict=True):
        ideal += 1 + (gap - 1) * scale
        first = at + max(1, round(ideal))
        ideal -= first - at
        out.append((first, first + run - 1))
        at = first + run
    return Pattern(max(period, at), tuple(out))


def _geometric(rng: random.Random, chance: float) -> int:
    """How many draws until one succeeds; 1 at least."""
    count = 1
    if chance < 1:
        # The inverse of the distribution, as one draw for each would take 1 / chance of them.
        count += int(rng.expovariate(1.0) / -math.log1p(-chance))
    return count
