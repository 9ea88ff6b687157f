"""Owners of whom nothing arrives, without ranks or time."""

from __future__ import annotations

import numpy as np
import pytest

from lossycoll.train.drift.bound import SilentOwners


@pytest.mark.parametrize("loss", [0.4, 0.9])
def test_an_owner_is_dead_after_sweeps_blocks_and_seconds_without_any(loss: float) -> None:
    draws = np.random.default_rng(9)
    some = SilentOwners(2, 3, 4)
    for step in range(3000):
        some.note(draws.random((3, 5)) > loss, float(step))
        assert not some.dead(float(step), 0.0)
    none = np.ones((3, 5), np.bool_)
    none[0] = False
    for step in range(3000, 3060):
        some.note(none, float(step))
        wanted = [0] if step - some.since[0] >= 55 else []
        assert some.dead(float(step), 55.0) == wanted
    assert wanted == [0]
    assert some.dead(3060.0, 100.0) == []
    assert some.dead(3060.0, 100.0, [0]) == []
    none[0, 3] = True
    some.note(none, 3060.0)
    assert some.dead(3060.0, 0.0) == []


def test_of_a_link_that_is_known_to_be_dead_no_sweep_is_waited_for() -> None:
    some = SilentOwners(2, 3, 100)
    some.note(np.ones((3, 1), np.bool_), 0.0)
    none = np.array([[False], [True], [True]])
    for step in range(1, 40):
        some.note(none, float(step))
        assert some.dead(float(step), 30.0) == []
        assert some.dead(float(step), 30.0, [0, 1]) == ([0] if step >= 30 else [])
