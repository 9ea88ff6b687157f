"""The rendezvous in any order of its steps: one process moves at a time, which is drawn by a seed.

A step is a look into the store; pauses pass on a clock that jumps. So each order is one a real job
could have, and thousands of them take seconds.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lossycoll.errors import RendezvousError
from lossycoll.runtime.world import polled_store, rendezvous
from lossycoll.runtime.world.rendezvous import GRACE_SECONDS, Rendezvous

TIMEOUT = 60.0
STARVED = 0.2
"""How often nobody moves though somebody could, and the clock jumps."""


class Turns:
    """Threads of which one moves at a time, and their clock. Stands in for the module ``time``."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._now = 0.0
        self._wakes: dict[int, float] = {}
        self._gates: dict[int, threading.Semaphore] = {}
        self._done = threading.Semaphore(0)

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._wakes[threading.get_ident()] = self._now + seconds
        self.step()

    def step(self) -> None:
        """Ends this thread's turn; returns when it has the next one."""
        me = threading.get_ident()
        self._pass_on()
        self._gates[me].acquire()

    def _pass_on(self) -> None:
        if not self._gates:
            self._done.release()
            return
        ready = [one for one in self._gates if self._wakes.get(one, 0.0) <= self._now]
        # Time passes for who sleeps also while others that could move are starved.
        if not ready or (self._wakes and self._random.random() < STARVED):
            self._now = max(self._now, min(self._wakes.values()))
            ready = [one for one, at in self._wakes.items() if at <= self._now]
        chosen = self._random.choice(ready)
        self._wakes.pop(chosen, None)
        self._gates[chosen].release()

    def run(self, works: list[Callable[[], None]]) -> None:
        begun = threading.Barrier(len(works) + 1)

        def body(work: Callable[[], None]) -> None:
            me = threading.get_ident()
            gate = self._gates[me] = threading.Semaphore(0)
            begun.wait()
            gate.acquire()
            work()
            del self._gates[me]
            self._pass_on()

        threads = [threading.Thread(target=body, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        begun.wait()
        self._pass_on()
        self._done.acquire()
        for thread in threads:
            thread.join()


class Store:
    """Shared keys; each use is a step."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._data: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._turns.step()
        self._data[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._data[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._turns.step()
        return [self._data[key] for key in keys]

    def add(self, key: str, value: int) -> int:
        self._turns.step()
        total = int(self._data.get(key, b"0")) + value
        self._data[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        self._turns.step()
        return all(key in self._data for key in keys)


def _outcomes(
    seed: int, ranks: list[int], size: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], float]:
    """What became of each process, and how long it took all of them."""
    turns = Turns(seed)
    for module in (rendezvous, polled_store):
        monkeypatch.setattr(module, "time", turns)
    store = Store(turns)
    alive: set[int] = set()
    out: list[Any] = [None] * len(ranks)

    def is_alive(hello: Mapping[str, Any]) -> bool:
        turns.step()
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

    turns.run([lambda i=i: work(i) for i in range(len(ranks))])  # type: ignore[misc]
    return out, turns.monotonic()


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(
    ("ranks", "size"), [([0, 1, 0], 2), ([0, 1, 1], 2), ([0, 1, 2, 0], 3), ([0, 1, 2, 2], 3)]
)
def test_one_process_too_many_is_told_in_any_order(
    ranks: list[int], size: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled = ranks[-1]
    ends = set()
    for seed in range(150):
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


def test_ranks_meet_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(150):
        found, seconds = _outcomes(seed, [0, 1, 2], 3, 3, monkeypatch)
        assert len(set(found)) == 1, f"seed {seed}: {found}"
        assert isinstance(found[0], str), f"seed {seed}: {found}"
        assert seconds < 2, f"seed {seed}: {seconds:.2f} s"
