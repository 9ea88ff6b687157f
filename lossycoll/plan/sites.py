"""Which hosts share a site, found from the round trips between them (docs/learnt-sites.md).

Several sites are found only where there is no doubt: hosts of one site are all near one another,
all others are far, and nothing lies between. Everything else is one site, which costs bytes but is
never wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Final

RATIO: Final = 5.0
"""A round trip between sites takes at least so many times as long as any within one."""
FAR: Final = 0.002
"""Seconds that a round trip between sites takes at least: that of 200 km of fibre."""


@dataclass(frozen=True, slots=True)
class Sites:
    """Sites that were found among the hosts."""

    of_hosts: tuple[int, ...]  # number of each host's site, by host; numbered by first appearance
    why: str  # the reason, for people


def measured_by(host: int, hosts: int) -> tuple[int, ...]:
    """The hosts to which ``host`` measures the round trip, ascending.

    Of each pair one measures, and each host as many as any other, or one more.
    """
    found = [(host + step) % hosts for step in range(1, (hosts + 1) // 2)]
    if hosts % 2 == 0 and host < hosts // 2:
        found.append(host + hosts // 2)
    return tuple(sorted(found))


def find_sites(hosts: int, round_trips: Mapping[tuple[int, int], float]) -> Sites:
    """Single linkage, cut at the widest gap, and refused unless all of its sites stand apart.

    ``round_trips``, in seconds, may lack pairs, or have a value for each direction, of which the
    smaller counts. What is no positive number counts as missing. A doubt leaves a single site.
    """
    known = _known(hosts, round_trips)
    found = _divided(hosts, known)
    return found if isinstance(found, Sites) else Sites((0,) * hosts, found)


def _divided(hosts: int, known: Mapping[tuple[int, int], float]) -> Sites | str:
    """The sites, or why there is but one."""
    if hosts < 3:
        return "fewer than three hosts have nothing to gain by sites"
    if len(known) < 2:
        return f"only {len(known)} of {hosts * (hosts - 1) // 2} round trips are known"
    gap = _widest_gap(sorted(known.values()))
    if gap is None:
        least, most = min(known.values()), max(known.values())
        return (
            f"round trips of {_ms(least)} to {_ms(most)} have no gap, from one to at least "
            f"{RATIO:g} times as much and {_ms(FAR)}"
        )
    near, far = gap
    of_hosts = _linked(hosts, [pair for pair, seconds in known.items() if seconds <= near])
    between = set()
    for (a, b), seconds in sorted(known.items()):
        if seconds > near and of_hosts[a] == of_hosts[b]:
            return (
                f"hosts {a} and {b} are {_ms(seconds)} apart, but linked by hosts that are at most "
                f"{_ms(near)} apart"
            )
        between.add((of_hosts[a], of_hosts[b]))
        between.add((of_hosts[b], of_hosts[a]))
    for one, other in combinations(range(max(of_hosts) + 1), 2):
        if (one, other) not in between:
            a, b = of_hosts.index(one), of_hosts.index(other)
            return f"no round trip is known between host {a}, or one near it, and host {b}"
    return Sites(
        of_hosts,
        f"round trips are at most {_ms(near)} within a site, and at least {_ms(far)} between two",
    )


def _known(
    hosts: int, round_trips: Mapping[tuple[int, int], float]
) -> dict[tuple[int, int], float]:
    """The usable ones, each pair once and in rising order."""
    known: dict[tuple[int, int], float] = {}
    for (a, b), seconds in round_trips.items():
        pair = min(a, b), max(a, b)
        if 0 <= pair[0] < pair[1] < hosts and math.isfinite(seconds) and seconds > 0:
            known[pair] = min(seconds, known.get(pair, math.inf))
    return known


def _widest_gap(values: list[float]) -> tuple[float, float] | None:
    """Two neighbours that are far enough from each other, of those the furthest, by ratio."""
    gaps = [(b / a, a, b) for a, b in pairwise(values) if b >= max(FAR, RATIO * a)]
    return max(gaps)[1:] if gaps else None


def _linked(hosts: int, pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    """By host the number of its set, of which each is linked with another one by a pair."""
    least = list(range(hosts))
    for a, b in pairs:
        one, other = sorted((least[a], least[b]))
        least = [one if found == other else found for found in least]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(least))}
    return tuple(numbers[found] for found in least)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
