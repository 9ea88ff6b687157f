"""The share of an owner's blocks that is missing, and when it is too large."""

from __future__ import annotations

from typing import Any

import numpy as np

from lossycoll.train.sharded.parameter_sync import UndeliveredShare


def feed(share_of: UndeliveredShare, share: float, steps: int, needed: Any = None) -> list[bool]:
    """``share`` of owner 1's 200 blocks are missing in each step; owner 2's all arrive."""
    for step in range(steps):
        arrived = np.ones((3, 200), bool)
        arrived[1] = (np.arange(200) * 37 + step) % 200 >= round(share * 200)
        share_of.note(needed, arrived)
    found: list[bool] = share_of.owners().tolist()
    return found


def test_an_owner_is_found_when_too_many_blocks_that_were_not_needed_are_missing() -> None:
    undelivered = UndeliveredShare(rank=0, world=3)
    assert feed(undelivered, 0.5, 1) == [False, False, False]  # too little is known
    assert feed(undelivered, 0.5, 1) == [False, True, False]
    assert feed(UndeliveredShare(0, 3), 0.015, 100) == [False, False, False]
    assert feed(UndeliveredShare(0, 3), 0.03, 100) == [False, True, False]
    # Blocks that had to come say nothing: only what is free tells that the link is well again.
    all_of_it = np.ones((3, 200), bool)
    assert feed(undelivered, 0.0, 1000, all_of_it) == [False, True, False]
    sample = all_of_it.copy()
    sample[1, ::16] = False
    assert feed(undelivered, 0.0, 500, sample) == [False, False, False]
    own = UndeliveredShare(rank=1, world=3)
    assert feed(own, 0.5, 10) == [False, False, False]
