"""Sites found from round trips: what is planted is found, or nothing, but never anything else."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lossycoll.plan.topology import FAR, RATIO, Sites, find_sites, measured_by

NAN = math.nan


@pytest.mark.parametrize("hosts", range(1, 12))
def test_of_each_pair_one_measures_and_all_as_many(hosts: int) -> None:
    mine = [measured_by(host, hosts) for host in range(hosts)]
    pairs = [(min(a, b), max(a, b)) for a in range(hosts) for b in mine[a]]
    assert sorted(pairs) == list(combinations(range(hosts), 2))
    assert max(map(len, mine)) - min(map(len, mine)) <= 1


@st.composite
def planted(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[tuple[int, int], float]]:
    """Hosts at sites, not all at one nor each at its own, and round trips that tell them apart."""
    sites = draw(st.lists(st.integers(0, 3), min_size=3, max_size=9))
    near = draw(st.floats(1e-5, 0.01))
    spread = draw(st.floats(1, RATIO * 0.99))
    far = draw(st.floats(1, 2)) * max(FAR, RATIO * near * spread)
    round_trips = {}
    for a, b in combinations(range(len(sites)), 2):
        least = near if sites[a] == sites[b] else far
        round_trips[a, b] = least * draw(st.floats(1, spread))
    return tuple(sites), round_trips


def numbered(labels: tuple[int, ...]) -> tuple[int, ...]:
    found: dict[int, int] = {}
    return tuple(found.setdefault(label, len(found)) for label in labels)


@given(planted())
def test_sites_that_stand_apart_are_found(
    case: tuple[tuple[int, ...], dict[tuple[int, int], float]],
) -> None:
    sites, round_trips = case
    found = find_sites(len(sites), round_trips)
    some = 1 < len(set(sites)) < len(sites)
    assert found.of_hosts == (numbered(sites) if some else (0,) * len(sites)), found.why


@given(planted(), st.data())
def test_what_is_missing_never_divides_otherwise(
    case: tuple[tuple[int, ...], dict[tuple[int, int], float]], data: st.DataObject
) -> None:
    sites, round_trips = case
    bad = st.sampled_from([None, NAN, math.inf, -math.inf, 0.0, -1.0])
    kept = {}
    for pair, seconds in round_trips.items():
        value = data.draw(bad) if data.draw(st.booleans()) else seconds
        if value is not None:
            kept[pair] = value
    found = find_sites(len(sites), kept).of_hosts
    assert found in ((0,) * len(sites), numbered(sites))


@given(planted(), st.data())
def test_numbers_of_hosts_and_directions_dont_matter(
    case: tuple[tuple[int, ...], dict[tuple[int, int], float]], data: st.DataObject
) -> None:
    sites, round_trips = case
    order = data.draw(st.permutations(range(len(sites))))
    moved = {}
    for (a, b), seconds in round_trips.items():
        pair = (order[a], order[b]) if data.draw(st.booleans()) else (order[b], order[a])
        moved[pair] = seconds
        if data.draw(st.booleans()):
            moved[pair[::-1]] = seconds * data.draw(st.floats(1, 100))
    before = find_sites(len(sites), round_trips).of_hosts
    after = find_sites(len(sites), moved).of_hosts
    assert numbered(tuple(after[order[host]] for host in range(len(sites)))) == before


@given(
    st.integers(1, 6),
    st.dictionaries(
        st.tuples(st.integers(-1, 6), st.integers(-1, 6)), st.floats(allow_nan=True), max_size=40
    ),
)
def test_any_values_give_sites_that_stand_apart(
    hosts: int, round_trips: dict[tuple[int, int], float]
) -> None:
    found = find_sites(hosts, round_trips).of_hosts
    assert len(found) == hosts
    assert found == numbered(found)
    if len(set(found)) > 1:
        usable = {
            pair: min(round_trips.get(pair, NAN), round_trips.get(pair[::-1], NAN), key=_order)
            for pair in combinations(range(hosts), 2)
        }
        known = {pair: value for pair, value in usable.items() if _order(value) < math.inf}
        within = [value for (a, b), value in known.items() if found[a] == found[b]]
        between = [value for (a, b), value in known.items() if found[a] != found[b]]
        assert min(between) >= max(FAR, RATIO * max(within))


def _order(seconds: float) -> float:
    return seconds if math.isfinite(seconds) and seconds > 0 else math.inf


def pairs(values: dict[str, float]) -> dict[tuple[int, int], float]:
    """By pairs that are written "01"."""
    return {(int(name[0]), int(name[1])): seconds for name, seconds in values.items()}


@pytest.mark.parametrize(
    ("hosts", "round_trips", "why"),
    [
        (2, {"01": 0.1}, "fewer than three hosts"),
        (3, {"01": 0.1}, "only 1 of 3 round trips"),
        (3, {"01": 0.03, "02": 0.04, "12": 0.05}, "round trips of 30 ms to 50 ms have no gap"),
        (3, {"01": 1e-4, "02": 1.9e-3, "12": 1.9e-3}, "no gap"),
        (3, {"01": 0.01, "02": 0.049, "12": 0.049}, "no gap"),
        (3, {"01": 1e-3, "02": 1e-3, "12": 0.1}, "hosts 1 and 2 are 100 ms apart, but linked by"),
        (4, {"01": 1e-3, "02": 0.1, "03": 0.1}, "between host 2, or one near it, and host 3"),
        (3, {"01": 1e-3, "02": NAN, "12": NAN}, "only 1 of 3"),
    ],
)
def test_why_there_is_one_site(hosts: int, round_trips: dict[str, float], why: str) -> None:
    found = find_sites(hosts, pairs(round_trips))
    assert found.of_hosts == (0,) * hosts
    assert why in found.why


def test_the_widest_gap_counts_and_says_so() -> None:
    """Hosts 0 and 1 in a hall, 2 in another of the city, 3 beyond the sea."""
    near = {"01": 1e-4, "02": 4e-3, "12": 4e-3}
    beyond = {"03": 0.08, "13": 0.08, "23": 0.08}
    why = "round trips are at most {} within a site, and at least {} between two"
    both = find_sites(4, pairs({**near, **beyond}))
    assert both == Sites((0, 0, 1, 2), why.format("0.1 ms", "4 ms"))
    near["01"] = 1e-3
    assert find_sites(4, pairs({**near, **beyond})) == Sites(
        (0, 0, 0, 1), why.format("4 ms", "80 ms")
    )
