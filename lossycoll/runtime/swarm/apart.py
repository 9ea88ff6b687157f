"""Pairs of peers that can't reach each other, and groups without such pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

FIRST_APART, MOST_APART = 10.0, 600.0
"""Seconds for which a pair isn't put into one group: at first, and at most. Each time that it fails
again they double, unless that is so long ago."""


def split(
    members: Sequence[int], apart: Callable[[int, int], bool], turn: Callable[[int], int]
) -> list[list[int]]:
    """Members in as few groups as a simple rule finds, none of which has a pair that is apart.

    Those that are apart from most choose first, each the smallest group that takes it. So groups
    are of about the same size, and whoever is apart from nobody evens them out.

    Args:
        members: Numbers, each once.
        apart: Whether two of them can't be in one group, whichever comes first.
        turn: Of a number: who chooses first of those that are apart from equally many. Another one
            each round, so that those who can't meet aren't always with the same others.

    Returns:
        The groups, each in rising order.
    """
    degree = {one: sum(apart(one, other) for other in members if other != one) for one in members}
    groups: list[list[int]] = []
    for one in sorted(members, key=lambda number: (-degree[number], turn(number), number)):
        takes = [
            group for group in groups if not degree[one] or not any(apart(one, k) for k in group)
        ]
        if takes:
            min(takes, key=len).append(one)
        else:
            groups.append([one])
    return sorted(sorted(group) for group in groups)


@dataclass
class Apart:
    """The pairs, as long as they are remembered. Bounded by the peers that live.

    Args:
        clock: In seconds.
    """

    clock: Callable[[], float]
    _pairs: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """Until when each is apart, and for how long it was set."""
    _others: dict[int, set[int]] = field(default_factory=dict)
    """With whom each is in a pair."""

    def note(self, one: int, other: int) -> None:
        """A pair has failed to meet. Both ends may say so: that is once."""
        now, pair = self.clock(), _pair(one, other)
        until, seconds = self._pairs.get(pair, (now, 0.0))
        if now >= until:
            was_long_ago = now - until > MOST_APART
            seconds = FIRST_APART if was_long_ago else max(FIRST_APART, 2 * seconds)
            self._pairs[pair] = now + min(MOST_APART, seconds), min(MOST_APART, seconds)
            self._others.setdefault(one, set()).add(other)
            self._others.setdefault(other, set()).add(one)

    def concerns(self, members: Sequence[int]) -> bool:
        """Whether any of them may be in a pair that is apart. Most groups have none."""
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
