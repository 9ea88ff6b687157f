"""The ages of blocks, and which of them the next step needs."""

from __future__ import annotations

import numpy as np

from lossycoll.train.sharded.parameter_sync import Staleness


def test_ages_count_steps_since_a_block_came() -> None:
    ages = Staleness(rank=1, blocks=[2] * 3, max_age=2)
    nothing = np.zeros((3, 2), bool)
    assert ages.needed() is None
    ages.advance(nothing)
    assert ages.values.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert ages.needed() is None
    some = nothing.copy()
    some[0, 1] = True
    ages.advance(some)
    assert ages.values.tolist() == [[2, 0], [0, 0], [2, 2]]
    needed = ages.needed()
    assert needed is not None
    assert needed.tolist() == [[True, False], [False, False], [True, True]]


def test_age_zero_needs_everything_and_none_nothing() -> None:
    everything = Staleness(rank=0, blocks=[3] * 2, max_age=0).needed()
    assert everything is not None
    assert everything.tolist() == [[False] * 3, [True] * 3]
    never = Staleness(rank=0, blocks=[3] * 2, max_age=None)
    for _ in range(100):
        never.advance(np.zeros((2, 3), bool))
    assert never.needed() is None
    assert never.values.tolist() == [[0] * 3, [100] * 3]


def test_of_strict_owners_all_but_a_turning_sample_is_needed() -> None:
    ages = Staleness(rank=0, blocks=[40] * 3, max_age=3)
    only = np.array([False, False, True])
    assert ages.needed(np.zeros(3, bool)) is None
    free = np.zeros(40, int)
    for _ in range(16):
        needed = ages.needed(only)
        assert needed is not None
        assert not needed[:2].any()
        assert 2 <= (~needed[2]).sum() <= 3
        free += ~needed[2]
        ages.advance(np.ones((3, 40), bool))
    assert (free == 1).all()
    for _ in range(3):
        ages.advance(np.zeros((3, 40), bool))
    needed = ages.needed(only)
    assert needed is not None
    assert needed[1:].all()  # too old to be a sample
