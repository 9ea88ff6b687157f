"""Who meets whom: processes as threads on a store in memory, by a virtual clock."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from lossycoll.errors import LossyError, OperationTimeout, RendezvousError
from lossycoll.runtime.world.polled_store import PolledStore
from lossycoll.train.elastic.agreement import (
    FRESH,
    Agreement,
    Generation,
    LastGeneration,
    Participant,
    Watch,
)
from tests.support.memory_store import MemoryStore
from tests.support.virtual_time import VirtualTime

LONG_SECONDS = 1000.0
"""Longer than any process waits here."""


class Died(Exception):
    """It says nothing more."""


class Process:
    """One that meets, on a thread."""

    def __init__(self, store: TimedStore, slot: int, slots: int, name: str = "") -> None:
        self.store, self.time = store, store.time
        self.dead = False
        self.incarnation = name or f"start of {slot}"
        polled = PolledStore(self._Mortal(self), f"slot {slot}")
        self.agreement = Agreement(
            polled, slot, slots, self.incarnation, clock=self.time.monotonic, sleep=self._sleep
        )
        self.agreed: Generation | None = None
        self.error: LossyError | None = None
        self.is_over = False

    class _Mortal:
        """The store of a process that may die: then it says nothing more."""

        def __init__(self, process: Process) -> None:
            self._process = process

        def __getattr__(self, name: str) -> Any:
            if self._process.dead:
                raise Died
            return getattr(self._process.store, name)

    def _sleep(self, seconds: float) -> None:
        if self.dead:
            raise Died
        self.time.sleep(seconds)
        if self.dead:
            raise Died

    def begin(
        self,
        steps: int = FRESH,
        lost: Iterable[int] = (),
        *,
        refused: Iterable[str] = (),
        grace: float = 8.0,
        timeout: float = 60.0,
    ) -> Process:
        last = self.agreed
        before = None if last is None else LastGeneration(last, frozenset(lost), frozenset(refused))
        number = 0 if last is None else last.number + 1

        def run() -> None:
            try:
                self.agreed = self.agreement.meet(steps, before, number, grace, timeout)
            except LossyError as error:
                self.error = error
            except Died:
                pass
            self.is_over = True

        self.is_over = False
        self.time.start(run)
        return self

    def end(self) -> Generation:
        self.time.run(LONG_SECONDS, lambda: self.is_over)
        assert self.is_over
        if self.error is not None:
            raise self.error
        assert self.agreed is not None
        return self.agreed

    def waits(self) -> bool:
        return not self.is_over


class TimedStore(MemoryStore):
    """A store, and the clock of those who use it."""

    def __init__(self) -> None:
        super().__init__()
        self.time = VirtualTime()


def met(slots: int = 3) -> tuple[TimedStore, list[Process]]:
    """A job whose first generation is there."""
    store = TimedStore()
    processes = [Process(store, slot, slots) for slot in range(slots)]
    for process in processes:
        process.begin()
    assert {process.end().number for process in processes} == {0}
    return store, processes


def test_all_slots_meet_first() -> None:
    store, processes = met(4)
    wanted = Generation(0, tuple(Participant(n, f"start of {n}", FRESH) for n in range(4)))
    assert [process.agreed for process in processes] == [wanted] * 4
    assert wanted.slots == (0, 1, 2, 3)
    assert wanted.source == 0
    assert store.data["generation"] == b"0"


def test_the_first_generation_has_all_slots_or_none() -> None:
    store = TimedStore()
    some = [Process(store, slot, 3).begin(grace=1.0, timeout=4.0) for slot in (0, 2)]
    for process in some:
        with pytest.raises(
            OperationTimeout, match=r"slots \[1\] of 3 have not come to generation 0"
        ):
            process.end()
    assert "members/0" not in store.data


def test_whoever_is_started_again_is_let_in_when_the_others_come() -> None:
    store, (first, second, third) = met()
    third.dead = True
    again = Process(store, 2, 3, "again").begin()
    store.time.run(10)  # longer than any grace
    assert again.waits()  # it can't know who goes on without it
    first.begin(7, lost=[2])
    second.begin(6, lost=[2])
    found = [process.end() for process in (first, second, again)]
    assert {one.number for one in found} == {1}
    assert found[0].members == (
        Participant(0, "start of 0", 7, 0),
        Participant(1, "start of 1", 6, 0),
        Participant(2, "again", FRESH),
    )


def test_the_state_of_most_steps_is_taken_and_the_first_of_several() -> None:
    members = tuple(
        Participant(n, str(n), steps) for n, steps in ((1, FRESH), (3, 9), (4, 9), (7, 2))
    )
    assert Generation(5, members).source == 1


def test_the_lost_are_not_waited_for() -> None:
    _, (first, second, third) = met()
    third.dead = True
    first.begin(3, lost=[2], grace=1e6)
    second.begin(3, lost=[2], grace=1e6)
    assert first.end().slots == second.end().slots == (0, 1)


def test_one_of_whom_nothing_is_known_is_waited_for_as_long_as_grace() -> None:
    store, (first, second, third) = met()
    third.dead = True
    begin = store.time.now
    first.begin(3, grace=8.0)
    second.begin(3, grace=8.0)
    assert first.end().slots == second.end().slots == (0, 1)
    assert store.time.now - begin >= 8.0


def test_one_that_dies_while_it_waits_is_no_member() -> None:
    store, (first, second, third) = met()
    third.dead = True
    again = Process(store, 2, 3, "again").begin()
    store.time.run(2)
    again.dead = True
    store.time.run(3)
    assert json.loads(store.data["participant/1/0"])[2] == "again"
    first.begin(1, lost=[2])
    second.begin(1, lost=[2])
    assert first.end().slots == second.end().slots == (0, 1)


def test_a_straggler_comes_to_the_next_one() -> None:
    store, (first, second, third) = met()
    first.begin(5, grace=1.0)
    second.begin(5, grace=1.0)
    assert first.end().slots == second.end().slots == (0, 1)
    third.begin(4)
    store.time.run(10)
    assert third.waits()
    first.begin(6, grace=1.0)
    second.begin(6, grace=1.0)
    assert first.end().slots == (0, 1, 2)
    assert {process.end().number for process in (first, second, third)} == {2}


def test_all_that_died_meet_when_all_slots_are_here() -> None:
    store, processes = met()
    for process in processes:
        process.dead = True
    some = [Process(store, slot, 3, f"again {slot}").begin() for slot in (0, 1)]
    store.time.run(10)
    assert all(process.waits() for process in some)
    some.append(Process(store, 2, 3, "again 2").begin())
    assert {process.end().number for process in some} == {1}
    assert some[0].end().source == 0


def test_a_slot_that_another_has_taken() -> None:
    store, (first, *_) = met()
    Process(store, 0, 3, "another")
    first.begin(1)
    with pytest.raises(RendezvousError, match="process another has this slot now, and start of 0"):
        first.end()


def test_who_waits_is_seen_while_it_lives() -> None:
    store, (first, _, third) = met()
    watch = first.agreement.watch(1)
    assert watch.look(store.time.now) == []
    again = Process(store, 2, 3, "again").begin()
    assert _seen(watch, store.time) == [Participant(2, "again", FRESH)]
    assert watch.silent == set()
    again.dead = True
    assert _seen(watch, store.time) == []
    assert watch.silent == {2}
    third.dead = True


def _seen(watch: Watch, time: VirtualTime) -> list[Participant]:
    """Who waits, after looks of two seconds."""
    for _ in range(10):
        time.run(0.2)
        found = watch.look(time.now)
    return found


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("", "no JSON"),
        ('{"slot": 1}', "no message"),
        ('["participant",1,"s",0,-1]', "is another thing"),
        ('["generation",1,[[1,"s",0,-1]]]', "is another thing"),
        ('["generation",0,[]]', "members: .*wanted a list of 1"),
        ('["generation",0,[[1,"",0,-1]]]', "incarnation: "),
        ('["generation",0,[[1,"s",0,-1],[1,"s",0,-1]]]', "ascending"),
        ('["generation",0,[[3,"s",0,-1]]]', "no member of a job of 3"),
        ('["generation",0,[[1,5,0,-1]]]', "incarnation: "),
        ('["generation",0,[[1,"s",-2,-1]]]', "steps: "),
        ('["generation",0,[[true,"s",0,-1]]]', "slot: "),
        ('["generation",0,[[1,"s",0]]]', "wanted 4 fields"),
        ('["generation",0,[{"slot": 1}]]', "wanted 4 fields"),
    ],
)
def test_what_is_no_generation_is_refused(said: str, text: str) -> None:
    store = TimedStore()
    process = Process(store, 1, 3)
    store.set("members/0", said)
    with pytest.raises(RendezvousError, match=text):
        process.agreement.members(0)


def test_a_number_that_is_none_is_counted_from_the_start() -> None:
    store, (first, *_) = met()
    for said in ("-7", "x", "9" * 30):
        store.set("generation", said)
        assert first.agreement.next_number() == 1


def test_few_do_not_go_on_without_the_others() -> None:
    """One that left by itself waits for the others, however long their steps are."""
    store, (first, second, third) = met()
    third.begin(9, grace=1.0)
    store.time.run(15)
    assert third.waits()
    first.begin(8, grace=1.0)
    second.begin(8, grace=1.0)
    assert {process.end().slots for process in (first, second, third)} == {(0, 1, 2)}


@pytest.mark.parametrize(
    ("here", "gone", "left", "enough"),
    [
        ({0, 1}, set(), set(), True),
        ({0}, set(), set(), False),
        ({0}, {1}, set(), True),  # half, with the lowest
        ({2}, {1}, set(), False),
        ({2}, {0, 1}, set(), True),
        ({2}, {1}, {0}, True),  # who was here and isn't any more counts for nothing
        ({3}, {0, 1, 2}, set(), False),
        (set(), {0, 1, 2}, set(), False),
    ],
    ids=str,
)
def test_who_may_go_on(here: set[int], gone: set[int], left: set[int], *, enough: bool) -> None:
    generation = Generation(4, tuple(Participant(slot, str(slot), 1) for slot in range(3)))
    assert LastGeneration(generation, frozenset(gone)).is_enough(here, left) == enough


def test_a_process_that_fits_no_group_is_left_out() -> None:
    store, (first, second, third) = met()
    third.dead = True
    again = Process(store, 2, 3, "again").begin(timeout=30.0)
    store.time.run(2)
    for process in (first, second):
        process.begin(1, lost=[2], refused=["again"])
    assert first.end().slots == second.end().slots == (0, 1)
    with pytest.raises(OperationTimeout, match=r"slots \[0, 1\] of 3 have not come"):
        again.end()


def test_what_a_stranger_writes_is_nobody() -> None:
    store, (first, second, third) = met()
    for at, said in enumerate(("{", "[]", '["participant",7,"s",0,-1]')):
        store.set(f"participant/1/{at}", said)
        store.add("places/1", 1)
    store.add("places/1", 1)  # and one that died before it said anything
    for process in (first, second, third):
        process.begin(1)
    assert {process.end().slots for process in (first, second, third)} == {(0, 1, 2)}


def test_a_store_that_fails_is_named() -> None:
    store, (first, *_) = met()
    store.broken = RuntimeError("connection reset by peer")
    first.begin(1)
    with pytest.raises(RendezvousError, match=r"slot 0: the store failed .*connection reset"):
        first.end()


def late(store: TimedStore, *slots: int, number: int = 3) -> list[Process]:
    """Processes that are started when the job has ended, or seems to have."""
    return [Process(store, slot, number, f"second of {slot}").begin(grace=5.0) for slot in slots]


def ends(process: Process, *lost: int) -> None:
    assert process.agreed is not None
    process.agreement.end(process.agreed, lost)


def test_one_that_comes_after_the_end_of_its_job_hears_of_it() -> None:
    """A second was killed as well, and isn't started again."""
    store, processes = met()
    ends(processes[0], 1, 2)
    (comes,) = late(store, 1)
    begin = store.time.monotonic()
    with pytest.raises(
        RendezvousError, match=r"the job has ended: slots \[0\] of its generation 0"
    ):
        comes.end()
    assert store.time.monotonic() - begin < 10.0  # and not after its timeout of 60


@pytest.mark.parametrize("what", ["one lives", "nobody has ended", "another mark"])
def test_a_job_that_may_go_on_has_not_ended(what: str) -> None:
    store, processes = met()
    if what == "one lives":
        ends(processes[0], 2)
    elif what == "another mark":
        store.set("ended/0/0", "[1, 2]")
        store.set("ended/0/1", "x")
    (comes,) = late(store, 2)
    with pytest.raises(OperationTimeout, match="have not come to generation 1"):
        comes.end()


def test_all_slots_begin_another_job_with_the_store_of_one_that_has_ended() -> None:
    store, processes = met()
    for process in processes:
        ends(process)
    again = late(store, 0, 1, 2)
    assert {process.end().number for process in again} == {1}
