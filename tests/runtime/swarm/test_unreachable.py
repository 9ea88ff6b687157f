"""Groups without pairs that can't reach each other, and how long such pairs are remembered."""

from __future__ import annotations

import random
from itertools import chain, combinations

import pytest

from lossycoll.runtime.swarm.directory_tables import (
    FIRST_UNREACHABLE,
    MOST_UNREACHABLE,
    UnreachablePairs,
    split,
)


def groups(members: list[int], pairs: set[tuple[int, int]], seed: int = 0) -> list[list[int]]:
    def unreachable(one: int, other: int) -> bool:
        return (min(one, other), max(one, other)) in pairs

    return split(members, unreachable, lambda one: random.Random(f"{seed}/{one}").getrandbits(32))


def test_without_pairs_there_is_one_group() -> None:
    assert groups([3, 1, 2], set()) == [[1, 2, 3]]
    assert groups([5], set()) == [[5]]
    assert groups([], set()) == []


def test_one_pair_makes_two_groups_of_one_size() -> None:
    found = groups(list(range(6)), {(1, 4)})
    assert sorted(map(len, found)) == [3, 3]
    assert sorted(chain(*found)) == list(range(6))
    assert not any({1, 4} <= set(group) for group in found)


@pytest.mark.parametrize("seed", range(60))
def test_no_group_has_an_unreachable_pair(seed: int) -> None:
    draw = random.Random(seed)
    members = draw.sample(range(128), draw.randrange(1, 33))
    share = draw.choice([0.01, 0.1, 0.5, 0.9, 1.0])
    pairs = {pair for pair in combinations(sorted(members), 2) if draw.random() < share}
    found = groups(members, pairs, seed)
    assert sorted(chain(*found)) == sorted(members)
    assert not any(pair in pairs for group in found for pair in combinations(group, 2))
    assert all(found)
    worst = max((sum(one in pair for pair in pairs) for one in members), default=0)
    assert len(found) <= worst + 1


def test_a_peer_that_reaches_nobody_is_alone() -> None:
    assert groups([0, 1, 2, 3], {(0, 1), (0, 2), (0, 3)}) == [[0], [1, 2, 3]]


def test_unreachable_peers_are_with_others_each_round() -> None:
    """Else what one of them has would never come to some."""
    met = set()
    for seed in range(20):
        for group in groups([0, 1, 2], {(0, 1)}, seed):
            met |= set(combinations(group, 2))
    assert met == {(0, 2), (1, 2)}


def test_pairs_are_remembered_for_a_while_and_longer_each_time() -> None:
    now = [0.0]
    unreachable = UnreachablePairs(lambda: now[0])
    assert not unreachable(1, 2)
    lasted = []
    for _ in range(9):
        unreachable.note(1, 2)
        unreachable.note(2, 1)  # both say so
        began = now[0]
        assert unreachable(2, 1)
        while unreachable(1, 2):
            now[0] += FIRST_UNREACHABLE / 2
        lasted.append(now[0] - began)
    assert lasted[:3] == [FIRST_UNREACHABLE, 2 * FIRST_UNREACHABLE, 4 * FIRST_UNREACHABLE]
    assert lasted[-1] == lasted[-2] == MOST_UNREACHABLE
    assert not unreachable(1, 3)
    now[0] += MOST_UNREACHABLE + 1  # it has gone well since
    unreachable.note(1, 2)
    now[0] += FIRST_UNREACHABLE
    assert not unreachable(1, 2)


def test_who_has_gone_is_forgotten() -> None:
    unreachable = UnreachablePairs(lambda: 0.0)
    for pair in combinations(range(5), 2):
        unreachable.note(*pair)
    assert sum(map(len, unreachable._others.values())) == 2 * 10
    unreachable.forget(2)
    assert sum(map(len, unreachable._others.values())) == 2 * 6
    assert not unreachable(2, 3)
    assert unreachable(3, 4)
