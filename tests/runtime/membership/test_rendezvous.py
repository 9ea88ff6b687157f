"""How ranks find one another: threads over a store in memory, that may be full of stale keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from lossycoll.errors import InterfaceError, LossyError, OptionError, RendezvousError
from lossycoll.runtime.membership.rendezvous import Rendezvous, compare_options


class Memory:
    """A store. ``broken``: what every call raises."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.broken: Exception | None = None
        self._lock = threading.Lock()

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def set(self, key: str, value: str) -> None:
        self._check()
        with self._lock:
            self.data[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._check()
        return self.data[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, value: int) -> int:
        self._check()
        with self._lock:
            total = int(self.data.get(key, b"0")) + value
            self.data[key] = str(total).encode()
            return total

    def check(self, keys: list[str]) -> bool:
        self._check()
        return all(key in self.data for key in keys)


Alive = Callable[[Mapping[str, Any]], bool]


def together(
    store: Memory,
    ranks: list[int],
    size: int,
    run: Callable[[Rendezvous, int], Any],
    *,
    timeout: float = 10.0,
    late: Mapping[int, float] | None = None,
    alive: Alive = lambda hello: False,
) -> list[Any]:
    """What ``run`` returned or raised in each of several threads; ``late``: seconds, by thread."""
    out: list[Any] = [None] * len(ranks)

    def work(i: int) -> None:
        time.sleep((late or {}).get(i, 0.0))
        rendezvous = Rendezvous(
            store, ranks[i], size, timeout, describe=f"process {i}", alive=alive
        )
        try:
            out[i] = run(rendezvous, ranks[i])
        except Exception as error:
            rendezvous.part(error)
            out[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def meet(rendezvous: Rendezvous, rank: int) -> Any:
    said = rendezvous.meet({"rank": rank})
    doubled = rendezvous.exchange("first", rank * 2)
    return rendezvous.session, said, doubled, rendezvous.exchange("second", "x" * rank)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_meet_and_exchange(size: int) -> None:
    store = Memory()
    found = together(store, list(range(size)), size, meet, late={0: 0.2, size - 1: 0.1})
    assert len({entry[0] for entry in found}) == 1
    for _, said, doubled, texts in found:
        assert said == [{"rank": rank} for rank in range(size)]
        assert doubled == [2 * rank for rank in range(size)]
        assert texts == ["x" * rank for rank in range(size)]


def test_what_is_to_be_done_meanwhile_is_done_until_all_have_come() -> None:
    done = threading.Event()

    def run(rendezvous: Rendezvous, rank: int) -> Any:
        rendezvous.meet({})
        if rank == 1:
            assert done.wait(10), "rank 0 waits and does nothing"
        return rendezvous.exchange("first", rank, done.set)

    assert together(Memory(), [0, 1], 2, run) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("late", [{0: 0.3}, {1: 0.3}, {}])
def test_keys_of_a_job_before_are_not_believed(late: dict[int, float]) -> None:
    store = Memory()
    sessions = set()
    for _ in range(3):  # a restart finds the same store, and rank 0 may come last
        found = together(store, [0, 1, 2], 3, meet, late=late)
        assert all(isinstance(entry, tuple) for entry in found), found
        sessions |= {entry[0] for entry in found}
    assert len(sessions) == 3


def test_keys_of_a_job_that_failed_are_not_believed() -> None:
    store = Memory()

    def fail(rendezvous: Rendezvous, rank: int) -> Any:
        return rendezvous.meet({}, OptionError("bad") if rank == 1 else None)

    assert all(isinstance(e, LossyError) for e in together(store, [0, 1, 2], 3, fail))
    found = together(store, [0, 1, 2], 3, meet, late={0: 0.3})
    assert all(isinstance(entry, tuple) for entry in found), found


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_cannot_take_part_tells_all(culprit: int) -> None:
    def run(rendezvous: Rendezvous, rank: int) -> Any:
        error = InterfaceError("no interface here") if rank == culprit else None
        return rendezvous.meet({}, error)

    begin = time.monotonic()
    found = together(Memory(), [0, 1, 2], 3, run, late={2: 0.2})
    assert time.monotonic() - begin < 3
    for rank, error in enumerate(found):
        assert type(error) is (InterfaceError if rank == culprit else RendezvousError)
        assert "no interface here" in str(error)
        if rank != culprit:
            assert f"rank {rank}/3" in str(error)
            assert f"rank {culprit} (process {culprit}) can't take part" in str(error)


def test_a_rank_that_fails_later_tells_all() -> None:
    def run(rendezvous: Rendezvous, rank: int) -> Any:
        rendezvous.meet({})
        if rank == 1:
            raise OptionError("no port is free")
        return rendezvous.exchange("links", rank)

    found = together(Memory(), [0, 1, 2], 3, run)
    assert type(found[1]) is OptionError
    for rank in (0, 2):
        assert f"rank {rank}/3: rank 1 can't take part: no port is free" in str(found[rank])


def test_missing_ranks_are_named_by_all_that_wait() -> None:
    found = together(Memory(), [0, 2], 5, meet, timeout=0.6)
    for error in found:
        assert isinstance(error, RendezvousError)
        assert "ranks 1, 3, 4 are missing after 0.6 s" in str(error)
        assert error.peer == 1
    (alone,) = together(Memory(), [1], 2, meet, timeout=0.3)
    assert "rank 1/2: rank 0 is missing after 0.3 s" in str(alone)


def test_a_rank_that_goes_silent_is_named() -> None:
    def run(rendezvous: Rendezvous, rank: int) -> Any:
        rendezvous.meet({})
        return None if rank == 2 else rendezvous.exchange("links", rank)

    found = together(Memory(), [0, 1, 2], 3, run, timeout=0.5)
    for error in found[:2]:
        assert "rank 2" in str(error)
        assert "round 'links'" in str(error) or "can't take part" in str(error)


def test_two_processes_of_one_rank_at_once() -> None:
    # Both wait for rank 0, so all three can know; on a busy machine one may still come late.
    found = together(Memory(), [0, 1, 1], 2, meet, late={0: 0.3}, alive=bool)
    errors = [error for error in found if isinstance(error, RendezvousError)]
    assert len(errors) in (1, 3), found
    for error in errors:
        assert "more than one process claims rank 1: process " in str(error)
        assert "process 1" in str(error)
        assert "process 2" in str(error)


def test_a_late_second_process_of_a_rank_knows_at_once() -> None:
    for rank in (0, 1):
        begin = time.monotonic()
        found = together(Memory(), [0, 1, rank], 2, meet, late={2: 0.5}, alive=bool)
        assert isinstance(found[0], tuple)
        assert isinstance(found[1], tuple)
        assert f"more than one process claims rank {rank}: " in str(found[2])
        assert "process 2" in str(found[2])
        assert time.monotonic() - begin < 3


def test_a_rank_that_makes_its_group_anew_waits_for_rank_0_to_leave_the_old_one() -> None:
    store = Memory()
    first = together(store, [0, 1], 2, meet)
    # Rank 0 may be slower to leave the first, or listen at the same port again.
    second = together(store, [0, 1], 2, meet, late={0: 0.3}, alive=lambda hello: True)
    for found in second:
        assert not isinstance(found, Exception), "an earlier group of its own is no other process"
    assert second[0][0] == second[1][0] != first[0][0]


def test_two_processes_of_rank_0_at_once() -> None:
    for gap in (0.0, 0.01, 0.05):
        found = together(Memory(), [0, 0, 1], 2, meet, late={1: gap, 2: 0.2}, timeout=5)
        errors = [error for error in found if isinstance(error, RendezvousError)]
        assert errors, found
        for error in errors:
            assert "more than one process claims rank 0" in str(error)


def test_a_store_that_fails_is_a_typed_error() -> None:
    store = Memory()

    def run(rendezvous: Rendezvous, rank: int) -> Any:
        rendezvous.meet({})
        if rank == 1:
            time.sleep(0.2)
            store.broken = RuntimeError("Connection reset by peer\nframe #0")
        return rendezvous.exchange("links", rank) if rank == 0 else None

    error, _ = together(store, [0, 1], 2, run)
    assert isinstance(error, RendezvousError)
    assert "the store failed in the rendezvous (Connection reset by peer)" in str(error)


def test_options_that_differ_give_one_verdict_everywhere() -> None:
    shared = [{"repair": 0, "seed": 1}, {"repair": 0, "seed": 1}, {"repair": 2, "seed": 1}]
    for rank in range(3):
        with pytest.raises(RendezvousError) as caught:
            compare_options(rank, shared)
        assert f"rank {rank}/3: option repair is 2 on rank 2 but 0 on rank 0" in str(caught.value)
        assert "LOSSYCOLL_REPAIR" in str(caught.value)
        assert caught.value.peer == 2
    compare_options(0, shared[:2])
