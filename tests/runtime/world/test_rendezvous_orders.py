"""The rendezvous in any order of its steps: one process moves at a time, which is drawn by a seed.

A step is a look into the store; pauses pass on a clock that jumps. So each order is one a real job
could have, and thousands of them take seconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from lossycoll.errors import RendezvousError
from lossycoll.runtime.world import polled_store, rendezvous
from lossycoll.runtime.world.rendezvous import GRACE_SECONDS, Rendezvous
from tests.support.virtual_time import VirtualTime

TIMEOUT = 60.0


class Store:
    """Shared keys; each use is a step."""

    def __init__(self, turns: VirtualTime) -> None:
        self._turns = turns
        self._data: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._turns.sleep(0.0)
        self._data[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._turns.sleep(0.0)
        return [self._data[key] for key in keys]

    def add(self, key: str, value: int) -> int:
        self._turns.sleep(0.0)
        total = int(self._data.get(key, b"0")) + value
        self._data[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        self._turns.sleep(0.0)
        return all(key in self._data for key in keys)


def _outcomes(
    seed: int, ranks: list[int], size: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], float]:
    """What became of each process, and how long it took all of them."""
    turns = VirtualTime(random.Random(seed))
    begin = turns.monotonic()
    for module in (rendezvous, polled_store):
        monkeypatch.setattr(module, "time", turns)
    store = Store(turns)
    alive: set[int] = set()
    out: list[Any] = [None] * len(ranks)

    def is_alive(hello: Mapping[str, Any]) -> bool:
        turns.sleep(0.0)
        return hello["process"] in alive

    def work(i: int) -> None:
        if random.Random(seed * 64 + i).random() < 0.5:
            turns.sleep(random.Random(seed * 64 + i).random() * 0.1)
        meeting = Rendezvous(
            store, ranks[i], size, TIMEOUT, describe=f"process {i}", alive=is_alive
        )
        alive.add(i)
        try:
            meeting.meet({"process": i})
            for number in range(rounds):
                meeting.exchange(f"round {number}", ranks[i])
            out[i] = meeting.session
        except RendezvousError as error:
            meeting.part(error)
            alive.discard(i)
            out[i] = error

    threads = [turns.start(partial(work, i)) for i in range(len(ranks))]
    turns.run(math.inf)
    for thread in threads:
        thread.join()
    return out, turns.monotonic() - begin


many = pytest.mark.parametrize("seeds", [50, pytest.param(150, marks=pytest.mark.long)])


@many
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(
    ("ranks", "size"), [([0, 1, 0], 2), ([0, 1, 1], 2), ([0, 1, 2, 0], 3), ([0, 1, 2, 2], 3)]
)
def test_one_process_too_many_is_told_in_any_order(
    ranks: list[int], size: int, rounds: int, seeds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled = ranks[-1]
    ends = set()
    for seed in range(seeds):
        found, seconds = _outcomes(seed, ranks, size, rounds, monkeypatch)
        where = f"seed {seed}: {found} after {seconds:.2f} s"
        assert seconds < 2 * GRACE_SECONDS + 2, where
        errors = [one for one in found if isinstance(one, RendezvousError)]
        for error in errors:
            assert f"more than one process claims rank {doubled}: " in str(error), where
        # Either all got the error, or those that met first went on, with one session.
        assert len(errors) in (1, size + 1), where
        assert len({one for one in found if isinstance(one, str)}) <= 1, where
        ends.add(len(errors))
    assert ends == {1, size + 1}


@many
def test_ranks_meet_in_any_order(seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(seeds):
        found, seconds = _outcomes(seed, [0, 1, 2], 3, 3, monkeypatch)
        assert len(set(found)) == 1, f"seed {seed}: {found}"
        assert isinstance(found[0], str), f"seed {seed}: {found}"
        assert seconds < 2, f"seed {seed}: {seconds:.2f} s"
