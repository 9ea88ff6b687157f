"""Unreachable pairs of peers, and groups without such pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

FIRST_UNREACHABLE, MOST_UNREACHABLE = 10.0, 600.0
"""Seconds for which a pair isn't put into one group: at first, and at most. Each time that it fails
again they double, unless that is so long ago."""


def split(
    members: Sequence[int], unreachable: Callable[[int, int], bool], turn: Callable[[int], int]
) -> list[list[int]]:
    """Split members into as few groups as a simple rule finds, none with an unreachable pair.
    Members with the most unreachable others choose first, each the smallest group that takes it. So
    groups are of about the same size, and members that reach everybody even them out.

    ``unreachable``: whether two of them can't be in one group, whichever comes first. ``turn``: key
    of a number: orders members with equally many unreachable others. Another one each round, so
    that both ends of a pair aren't always with the same others. Returns the groups, each in rising
    order.
    """
    degree = {
        one: sum(unreachable(one, other) for other in members if other != one) for one in members
    }
    groups: list[list[int]] = []
    for one in sorted(members, key=lambda number: (-degree[number], turn(number), number)):
        takes = [
            group
            for group in groups
            if not degree[one] or not any(unreachable(one, k) for k in group)
        ]
        if takes:
            min(takes, key=len).append(one)
        else:
            groups.append([one])
    return sorted(sorted(group) for group in groups)


@dataclass
class UnreachablePairs:
    """Unreachable pairs, as long as they are remembered. Bounded by the peers that live."""

    clock: Callable[[], float]
    _pairs: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """End of each pair's unreachable time, and its length."""
    _others: dict[int, set[int]] = field(default_factory=dict)
    """With whom each is in a pair."""

    def note(self, one: int, other: int) -> None:
        """Note a pair that has found no route. Both ends may say so: that is once."""
        now, pair = self.clock(), _pair(one, other)
        until, seconds = self._pairs.get(pair, (now, 0.0))
        if now >= until:
            was_long_ago = now - until > MOST_UNREACHABLE
            seconds = FIRST_UNREACHABLE if was_long_ago else max(FIRST_UNREACHABLE, 2 * seconds)
            self._pairs[pair] = now + min(MOST_UNREACHABLE, seconds), min(MOST_UNREACHABLE, seconds)
            self._others.setdefault(one, set()).add(other)
            self._others.setdefault(other, set()).add(one)

    def concerns(self, members: Sequence[int]) -> bool:
        """True if any of them may be in an unreachable pair. Most groups have none."""
        return any(one in self._others for one in members)

    def forget(self, number: int) -> None:
        """A peer has gone; whoever comes by its number is another."""
        for other in self._others.pop(number, set()):
            del self._pairs[_pair(number, other)]
            self._others[other].discard(number)
            if not self._others[other]:
                del self._others[other]

    def __call__(self, one: int, other: int) -> bool:
        until, _ = self._pairs.get(_pair(one, other), (0.0, 0.0))
        return self.clock() < until


def _pair(one: int, other: int) -> tuple[int, int]:
    return (one, other) if one < other else (other, one)
