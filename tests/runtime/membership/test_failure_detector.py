"""The control plane by itself: several ranks in threads of one process, over real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import zmq

from lossycoll.errors import RendezvousError
from lossycoll.runtime.membership.failure_detector import BEATS_PER_LIVENESS, Control
from lossycoll.runtime.membership.hub_sockets import Star, reachable
from lossycoll.runtime.membership.view_agreement import View

TOKEN = "secret"
LIVENESS = 3.0
"""Long enough that a machine that is busy elsewhere for two seconds is no death."""


class Notes:
    """A listener that logs what is reported to it; ``calls``: what was called at each number."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.log: list[tuple[Any, ...]] = []
        self.when: list[float] = []
        self.calls: dict[int, str] = {}
        self.next = 10 + rank
        self.beats = 0

    def _note(self, *what: Any) -> None:
        self.log.append(what)
        self.when.append(time.monotonic())

    def on_dead(self, rank: int, silent: float, ended: bool) -> None:
        assert silent >= 0.7 * LIVENESS or ended or rank == self.rank
        self._note("dead", rank)

    def on_abort(self, rank: int, reason: str, kind: str) -> None:
        self._note("abort", rank, reason, kind)

    def on_bye(self, rank: int, seq: int, why: str) -> None:
        self._note("bye", rank, seq)

    def on_mismatch(self, seq: int, calls: dict[int, str]) -> None:
        self._note("mismatch", seq, tuple(sorted(calls.items())))

    def on_broken(self, error: Exception) -> None:
        self._note("broken", repr(error))

    def call_at(self, seq: int) -> str | None:
        return self.calls.get(seq)

    def on_lost(self, rank: int, silent: float, ended: bool) -> int:
        assert silent >= 0.7 * LIVENESS or ended
        self._note("lost", rank)
        return self.next

    def on_views(self, views: Sequence[View], agreed: bool) -> None:
        self._note("views", [(view.first, view.members) for view in views], agreed)

    def on_apart(self, lost: Sequence[int], left: Sequence[int]) -> None:
        self._note("apart", list(lost), list(left))

    def figures(self) -> dict[str, Any]:
        self.beats += 1
        return {"rank": self.rank, "operations": 10 * self.rank}


class Group:
    def __init__(
        self,
        world: int,
        liveness: float,
        outlive: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.controls = [
            Control(rank, world, liveness, outlive=outlive, clock=clock) for rank in range(world)
        ]
        self.notes = [Notes(rank) for rank in range(world)]
        endpoints = [("127.0.0.1", control.open("127.0.0.1")) for control in self.controls]
        self.port = endpoints[0][1]
        for control, note in zip(self.controls, self.notes, strict=True):
            control.start(note, TOKEN, endpoints)
        assert all(control.meet(5) for control in self.controls)

    def silence(self, rank: int) -> None:
        """The rank goes on living, but nothing of it is heard any more."""
        star = self.controls[rank]._star
        star.send = lambda *_: True  # type: ignore[method-assign]
        star.ask = star.answer = lambda *_: None  # type: ignore[method-assign]


class Clock:
    """Time that passes when a test says so, beat by beat, for all ranks alike."""

    def __init__(self, liveness: float) -> None:
        self.now = 1000.0
        self.beat = liveness / BEATS_PER_LIVENESS

    def __call__(self) -> float:
        return self.now

    def pass_beats(self, group: Group, count: int, mute: Sequence[int] = ()) -> None:
        """``mute``: ranks of which nothing is heard."""
        for _ in range(count):
            beats = [note.beats for note in group.notes]
            self.now += 1.0001 * self.beat
            for control in group.controls:
                os.eventfd_write(control._wake, 1)
            until(
                lambda seen=beats: all(  # type: ignore[misc]
                    note.beats > before for note, before in zip(group.notes, seen, strict=True)
                )
            )
            until(lambda: all(self._is_heard(control, mute) for control in group.controls))

    def _is_heard(self, control: Control, mute: Sequence[int]) -> bool:
        """Whether the rank has heard this beat of all that it can hear."""
        return all(
            when >= self.now or rank in mute or control._rank in mute
            for rank, when in list(control._heard.items())
        )


@contextlib.contextmanager
def star(
    world: int,
    liveness: float = 30.0,
    *,
    outlive: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Group]:
    made = Group(world, liveness, outlive, clock)
    try:
        yield made
    finally:
        for control in made.controls:
            control.close()


def until(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


def quiet(seconds: float, notes: list[Notes]) -> None:
    time.sleep(seconds)
    assert all(not note.log for note in notes), [note.log for note in notes]


@pytest.mark.parametrize("sender", [0, 2])
def test_an_abort_reaches_every_other_rank_once(sender: int) -> None:
    with star(4) as s:
        begin = time.monotonic()
        s.controls[sender].abort("out of memory", "EngineError")
        others = [note for note in s.notes if note.rank != sender]
        until(lambda: all(note.log for note in others))
        assert time.monotonic() - begin < 5
        time.sleep(0.05)
        for note in others:
            assert note.log == [("abort", sender, "out of memory", "EngineError")]
        assert s.notes[sender].log == []


def test_what_is_reported_right_after_meeting_reaches_even_those_that_came_last() -> None:
    controls = [Control(rank, 3, 30.0) for rank in range(3)]
    notes = [Notes(rank) for rank in range(3)]
    try:
        endpoints = [("127.0.0.1", control.open("127.0.0.1")) for control in controls]
        for rank in (0, 1):
            controls[rank].start(notes[rank], TOKEN, endpoints)
        begin = time.monotonic()
        assert not controls[0].meet(0.2)
        assert controls[0].missing() == [2]
        assert not controls[1].meet(0.1)
        assert 0.25 < time.monotonic() - begin < 5
        controls[2].start(notes[2], TOKEN, endpoints)
        assert controls[0].meet(5)
        controls[0].abort("at once", "EngineError")
        controls[0].close()
        assert all(control.meet(5) for control in controls[1:])
        until(lambda: all(note.log for note in notes[1:]))
        assert [note.log for note in notes[1:]] == [[("abort", 0, "at once", "EngineError")]] * 2
    finally:
        for control in controls:
            control.close()


def test_nobody_waits_to_meet_a_group_that_has_been_given_up() -> None:
    controls = [Control(rank, 3, LIVENESS) for rank in range(3)]
    try:
        endpoints = [("127.0.0.1", control.open("127.0.0.1")) for control in controls]
        for rank in (0, 1):
            controls[rank].start(Notes(rank), TOKEN, endpoints)
        begin = time.monotonic()
        assert not any(control.meet(20) for control in controls[:2])  # rank 2 never comes
        assert time.monotonic() - begin < 2 * LIVENESS
    finally:
        for control in controls:
            control.close()


def test_a_goodbye_is_heard_though_rank_0_has_said_its_own() -> None:
    for _ in range(20):
        with star(2) as s:
            s.controls[0].leave(1)
            until(lambda: bool(s.notes[1].log))
            s.controls[1].leave(1)
            s.controls[1].close()
            until(lambda: s.notes[0].log == [("bye", 1, 1)])


@pytest.mark.parametrize("victim", [0, 1])
def test_silence_is_death_within_the_liveness_and_not_long_before(victim: int) -> None:
    clock = Clock(LIVENESS)
    with star(3, LIVENESS, clock=clock) as s:
        clock.pass_beats(s, 3 * BEATS_PER_LIVENESS)
        assert not any(note.log for note in s.notes), "nobody was silent"
        s.silence(victim)
        clock.pass_beats(s, BEATS_PER_LIVENESS // 2, mute=[victim])
        assert not any(note.log for note in s.notes), "half of the liveness is no death"
        clock.pass_beats(s, BEATS_PER_LIVENESS // 2, mute=[victim])
        others = [note for note in s.notes if note.rank != victim]
        until(lambda: all(note.log == [("dead", victim)] for note in others))


def test_ranks_that_slept_themselves_accuse_nobody() -> None:
    clock = Clock(LIVENESS)
    with star(3, LIVENESS, clock=clock) as s:
        clock.pass_beats(s, 2)
        clock.now += 2 * LIVENESS  # the whole machine was suspended, say
        clock.pass_beats(s, BEATS_PER_LIVENESS)
        assert not any(note.log for note in s.notes)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_silent_rank_is_declared_dead_in_time(victim: int) -> None:
    with star(3, LIVENESS) as s:
        quiet(1.2 * LIVENESS, s.notes)  # as long as all are heard, nobody is
        begin = time.monotonic()
        s.silence(victim)
        others = [note for note in s.notes if note.rank != victim]
        until(lambda: all(note.log for note in others), 2 * LIVENESS)
        for note in others:
            assert note.log == [("dead", victim)]
            assert 0.5 * LIVENESS < note.when[0] - begin < 2 * LIVENESS
        if victim:  # rank 0 still reaches it, and says so
            until(lambda: s.notes[victim].log == [("dead", victim)])


@pytest.mark.parametrize("leaver", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_rank_that_says_goodbye_is_not_dead(leaver: int) -> None:
    with star(3, LIVENESS) as s:
        s.controls[leaver].leave(41)
        s.controls[leaver].close()
        others = [note for note in s.notes if note.rank != leaver]
        until(lambda: all(note.log for note in others))
        time.sleep(1.5 * LIVENESS)
        assert all(note.log == [("bye", leaver, 41)] for note in others)


def test_a_goodbye_that_comes_with_the_end_of_the_process_is_the_better_reason() -> None:
    with star(3) as s:
        hub = s.controls[0]._star
        broken = hub.disconnected

        def late() -> set[int]:  # rank 2 leaves after rank 0 has looked for messages
            if not s.controls[2]._stopping:
                s.controls[2].leave(41)
                s.controls[2].close()
                until(lambda: hub.ended((2,)) == {2})
            return broken()

        hub.disconnected = late  # type: ignore[method-assign]
        until(lambda: bool(s.notes[0].log) and bool(s.notes[1].log))
        time.sleep(0.2)
        assert s.notes[0].log == s.notes[1].log == [("bye", 2, 41)]


def test_hosts_that_do_not_answer_are_asked_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lossycoll.runtime.membership.hub_sockets.PROBE_SECONDS", 1.0)
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(4):  # who neither accepts nor has room for more doesn't answer
            mute = stack.enter_context(socket.socket())
            mute.bind(("127.0.0.1", 0))
            mute.listen(0)
            for _ in range(2):
                full = stack.enter_context(socket.socket())
                full.setblocking(False)
                full.connect_ex(mute.getsockname())
            ports.append(mute.getsockname()[1])
        alive = stack.enter_context(socket.socket())
        alive.bind(("127.0.0.1", 0))
        alive.listen()
        with socket.socket() as ended:
            ended.bind(("127.0.0.1", 0))
            ports = [0, *ports, alive.getsockname()[1], ended.getsockname()[1]]
        made = Star(0, len(ports))
        made._endpoints = [("127.0.0.1", port) for port in ports]
        begin = time.monotonic()
        assert made.ended(range(1, len(ports))) == {6}
        assert 0.9 < time.monotonic() - begin < 3.5
        made.close(0)


def test_a_rank_that_is_starved_itself_accuses_nobody() -> None:
    with star(2, LIVENESS) as s:
        slow = s.notes[0].figures
        held = threading.Event()

        def stuck() -> dict[str, Any]:
            if not held.is_set():
                held.set()
                time.sleep(1.5 * LIVENESS)  # rank 0's thread hears nothing meanwhile
            return slow()

        s.notes[0].figures = stuck  # type: ignore[method-assign]
        until(held.is_set)
        time.sleep(1.6 * LIVENESS)
        assert s.notes[0].log == []


def test_a_mismatch_is_reported_to_all_with_both_calls() -> None:
    with star(3) as s:
        for note in s.notes:
            note.calls[7] = "all_reduce float32[10] SUM"
        s.controls[1].waiting(7, "all_reduce float32[10] SUM")
        quiet(0.2, s.notes)
        s.notes[2].calls[7] = "barrier"
        s.controls[1].waiting(7, "all_reduce float32[10] SUM")
        until(lambda: all(note.log for note in s.notes))
        for note in s.notes:
            assert note.log[0] == (
                "mismatch",
                7,
                ((1, "all_reduce float32[10] SUM"), (2, "barrier")),
            )
        s.controls[0].waiting(9, "barrier")  # nobody is there yet
        time.sleep(0.1)
        assert all(reported[1] == 7 for note in s.notes for reported in note.log)


def test_every_rank_can_ask_for_everybodys_figures() -> None:
    with star(3, LIVENESS) as s:
        time.sleep(0.3 * LIVENESS)
        for control in s.controls:
            begin = time.monotonic()
            assert control.group_figures(60) == {
                rank: {"rank": rank, "operations": 10 * rank} for rank in range(3)
            }
            assert time.monotonic() - begin < 30


HOSTILE = [
    b"",
    b"\x80\x04\x95pickle",
    b"null",
    b"[]",
    b"{}",
    b"[" * 200_000,
    json.dumps({"t": "wrong", "r": 1, "k": "abort", "reason": "x", "kind": "y"}).encode(),
    json.dumps({"t": 5, "r": 1, "k": "abort"}).encode(),
    json.dumps({"t": "\u00e9", "r": 1, "k": "abort"}).encode(),
]
"""Without the token, or nothing of ours at all."""
BROKEN = [
    json.dumps({"t": TOKEN, "r": 9, "k": "beat"}).encode(),
    json.dumps({"t": TOKEN, "r": 0, "k": "beat"}).encode(),
    json.dumps({"t": TOKEN, "r": "1", "k": "beat"}).encode(),
    json.dumps({"t": TOKEN, "r": True, "k": []}).encode(),
    json.dumps({"t": TOKEN, "r": 1, "k": "abort"}).encode(),
    json.dumps({"t": TOKEN, "r": 1, "k": "mismatch", "seq": "x", "call": 1, "rank": []}).encode(),
    json.dumps({"t": TOKEN, "r": 1, "k": "bye", "seq": None}).encode(),
    json.dumps({"t": TOKEN, "r": 1, "k": "bye", "seq": float("inf")}).encode(),
]


def test_foreign_and_malformed_messages_are_counted_and_dropped() -> None:
    with star(2) as s, zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://127.0.0.1:{s.port}")
        route = s.controls[0]._star.routes[1]
        for body in HOSTILE:
            stranger.send(body)
        stranger.send_multipart([b"many", b"frames", b"{}"])
        until(lambda: s.controls[0].foreign == len(HOSTILE) + 1)
        assert s.controls[0]._star.routes[1] == route
        for body in BROKEN:
            stranger.send(body)
        until(lambda: s.controls[0].foreign == len(HOSTILE) + 1 + len(BROKEN))
        with socket.create_connection(("127.0.0.1", s.port)) as raw:
            raw.sendall(os.urandom(1000))
        time.sleep(0.1)
        assert not s.notes[0].log
        assert not s.notes[1].log
        s.controls[1].abort("still here", "EngineError")
        until(lambda: bool(s.notes[0].log))
        assert s.notes[0].log == [("abort", 1, "still here", "EngineError")]


def test_ports_and_reachability() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert reachable("127.0.0.1", port)
        control = Control(0, 2, LIVENESS)
        with pytest.raises(
            RendezvousError, match=f"no free TCP port at 127.0.0.1 in {port}-{port}"
        ):
            control.open("127.0.0.1", (port, port))
        control.close()
    assert not reachable("127.0.0.1", port)


def test_threads_and_descriptors_are_given_back() -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with star(3):
        pass
    before = count()
    for _ in range(5):
        with star(3):
            pass
    unused = Control(1, 2, LIVENESS)
    unused.close()
    unused.close()
    assert count() == before


def test_closing_while_others_post_is_safe() -> None:
    with star(2) as s:
        stop = threading.Event()
        posted = [0, 0, 0]
        failed: list[Exception] = []

        def post(number: int) -> None:
            try:
                while not stop.is_set():
                    s.controls[1].waiting(1, "barrier")
                    posted[number] += 1
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=post, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: min(posted) > 10 or bool(failed))
        s.controls[1].leave(1)
        s.controls[1].close()
        before = list(posted)
        until(lambda: all(now > then for now, then in zip(posted, before, strict=True)))
        stop.set()
        for thread in threads:
            thread.join(5)
        assert not failed
        assert not any(thread.is_alive() for thread in threads)


# ---- groups that outlive a rank ----

FIRST = (0, (0, 1, 2, 3))


def view_of(star: Group, *left: int, since: int = 1) -> tuple[int, tuple[int, ...]]:
    """What those that are left must agree on after ``since`` losses, and do."""
    until(lambda: all(len(views(star, rank)) > since for rank in left), 3 * LIVENESS)
    found = {views(star, rank)[since] for rank in left}
    assert len(found) == 1, found
    return found.pop()


def views(star: Group, rank: int) -> list[tuple[int, tuple[int, ...]]]:
    reported = [entry for entry in star.notes[rank].log if entry[0] == "views"]
    return reported[-1][1] if reported else []


@pytest.mark.parametrize(
    ("ended", "victim"),
    [(True, 0), (True, 3), pytest.param(False, 0, marks=pytest.mark.long), (False, 3)],
)
def test_survivors_agree_on_who_is_left_and_from_when_on(victim: int, ended: bool) -> None:
    liveness = 30.0 if ended else LIVENESS
    with star(4, liveness, outlive=True) as s:
        begin = time.monotonic()
        if ended:
            s.controls[victim].close()  # and says no goodbye
        else:
            s.silence(victim)
        left = [rank for rank in range(4) if rank != victim]
        # No rank has submitted its operation 10 + rank yet, so the greatest of these is the first.
        assert view_of(s, *left) == (10 + max(left), tuple(left))
        assert time.monotonic() - begin < (0.5 * liveness if ended else 2 * liveness)
        for rank in left:
            assert s.notes[rank].log[0] == ("lost", victim)
            assert s.notes[rank].log[-1] == ("views", [FIRST, (10 + max(left), tuple(left))], True)
        time.sleep(0.5 if ended else 1.2 * LIVENESS)
        assert all(len(s.notes[rank].log) == 2 for rank in left)  # and then there is peace
        if not ended:
            last = s.notes[victim].log
            until(lambda: bool(last) and last[-1][0] in ("dead", "apart"), 3 * LIVENESS)


def test_hubs_may_die_one_after_another() -> None:
    with star(4, LIVENESS, outlive=True) as s:
        s.controls[0].close()
        view_of(s, 1, 2, 3)
        for note in s.notes:
            note.next = 50 - note.rank
        s.controls[1].close()
        assert view_of(s, 2, 3, since=2) == (48, (2, 3))
        s.controls[2].close()
        # One of two isn't the larger part; but a process that has ended isn't a part.
        assert view_of(s, 3, since=3) == (48, (3,))


def test_two_may_die_at_once() -> None:
    with star(4, LIVENESS, outlive=True) as s:
        s.silence(0)
        s.controls[2].close()
        until(lambda: all(views(s, rank)[-1:] == [(13, (1, 3))] for rank in (1, 3)), 3 * LIVENESS)
        assert views(s, 1) == views(s, 3)


def test_the_smaller_part_of_a_broken_network_ends() -> None:
    with star(4, LIVENESS, outlive=True) as s:
        for rank in (1, 2, 3):
            s.silence(rank)
        until(lambda: ("apart", [1, 2, 3], [0]) in s.notes[0].log, 3 * LIVENESS)
        time.sleep(0.5 * LIVENESS)
        assert not views(s, 0)


def test_a_rank_that_left_is_gone_without_when_it_is_missed() -> None:
    for leaver in (0, 2):
        with star(4, LIVENESS, outlive=True) as s:
            s.controls[leaver].leave(7)
            left = [rank for rank in range(4) if rank != leaver]
            until(lambda: all(s.notes[rank].log for rank in left))  # noqa: B023
            s.controls[leaver].close()
            time.sleep(0.3)
            assert not any(views(s, rank) for rank in left)
            for rank in left[1:]:  # not all need to miss it
                s.controls[rank].missed(leaver)
            if leaver == 0:  # a hub is missed by each for itself
                s.controls[left[0]].missed(leaver)
            assert view_of(s, *left)[1] == tuple(left)


def test_a_hub_that_ends_with_others_is_followed_at_once() -> None:
    """Whoever takes its place has no connection yet whose end would tell of theirs."""
    with star(7, outlive=True) as s:
        for rank in (0, 2, 3, 4, 5):
            s.controls[rank].close()
        until(lambda: all(views(s, rank)[-1:] == [(16, (1, 6))] for rank in (1, 6)))
        assert views(s, 1) == views(s, 6)


def test_who_slept_while_the_others_went_on_and_ended_does_not_go_on_alone() -> None:
    with star(3, LIVENESS, outlive=True) as s:
        figures, held, end = s.notes[0].figures, threading.Event(), threading.Event()

        def stuck() -> dict[str, Any]:
            held.set()
            end.wait(10 * LIVENESS)
            return figures()

        s.notes[0].figures = stuck  # type: ignore[method-assign]
        until(held.is_set)
        assert view_of(s, 1, 2) == (12, (1, 2))
        for rank in (1, 2):
            s.controls[rank].close()
        end.set()
        until(lambda: any(reported[0] == "apart" for reported in s.notes[0].log), 3 * LIVENESS)
        assert not views(s, 0)


def test_who_slept_for_long_but_was_waited_for_may_go_on_alone() -> None:
    with star(2, LIVENESS, outlive=True) as s:
        control, figures = s.controls[0], s.notes[0].figures
        slept, doubts = threading.Event(), list[bool]()
        # Such a sleep and a beat's interval may be more than others wait for; this one does wait.
        s.controls[1]._silence = 60.0

        def stuck() -> dict[str, Any]:
            # The thread asks at each beat, just after it has judged how late it is.
            if slept.is_set():
                doubts.append(control._woke is not None)
            else:
                time.sleep(0.6 * LIVENESS)
                slept.set()
            return figures()

        s.notes[0].figures = stuck  # type: ignore[method-assign]
        until(lambda: bool(doubts) and not doubts[-1], 30)
        assert doubts[0]
        s.controls[1].close()
        assert view_of(s, 0) == (10, (0,))


def test_what_a_hub_reported_only_to_some_before_it_died_is_so() -> None:
    with star(4, outlive=True) as s:
        reported = {"k": "dead", "rank": 3, "silent": 30.0, "ended": False}
        s.controls[0]._on_state = lambda _: None  # type: ignore[method-assign]  # dies before
        s.controls[0]._star.send(reported, 2)
        until(lambda: ("lost", 3) in s.notes[2].log)
        s.controls[0].close()
        assert view_of(s, 1, 2) == (12, (1, 2))
        until(lambda: s.notes[3].log[-1] == ("dead", 3))


def test_a_hub_that_leaves_while_the_others_agree_is_not_waited_for() -> None:
    with star(4, 8.0, outlive=True) as s:
        hub = s.controls[0]._star
        send = hub.send

        def undecided(message: dict[str, Any], rank: int | None = None) -> bool:
            return message["k"] == "views" or send(message, rank)

        hub.send = undecided  # type: ignore[method-assign]
        s.controls[3].close()
        until(lambda: all(("lost", 3) in s.notes[rank].log for rank in (0, 1, 2)))
        s.controls[0].leave(7)
        s.controls[0].close()
        until(lambda: all(views(s, rank)[-1:] == [(12, (1, 2))] for rank in (1, 2)), 10)


def test_a_rank_lost_before_the_group_is_made_ends_it() -> None:
    controls = [Control(rank, 3, LIVENESS, outlive=True) for rank in range(3)]
    notes = [Notes(rank) for rank in range(3)]
    try:
        endpoints = [("127.0.0.1", control.open("127.0.0.1")) for control in controls]
        for rank in (0, 1):
            controls[rank].start(notes[rank], TOKEN, endpoints)
        begin = time.monotonic()
        assert not any(control.meet(20) for control in controls[:2])  # rank 2 never comes
        assert time.monotonic() - begin < 2 * LIVENESS
        assert notes[0].log == notes[1].log == [("dead", 2)]
    finally:
        for control in controls:
            control.close()


ABSURD = [
    {"k": "dead", "rank": -1, "silent": 1.0, "ended": True},
    {"k": "dead", "rank": 9, "silent": 1.0, "ended": True},
    {"k": "dead", "rank": float("inf"), "silent": 1.0, "ended": True},
    {"k": "views", "views": [[0, [0, 1, 2]], [float("inf"), [0, 1]]]},
    {"k": "views", "views": [[0, [0, 1, 2]], [-1, [0, 1]]]},
    {"k": "views", "views": [[0, [0, 1, 2]], [3, [0, 7]]]},
    {"k": "views", "views": [[3, [0, 1, 2]], [4, [0, 1]]]},
    {"k": "views", "views": []},
    {"k": "state", "lost": [5], "next": 1, "views": [[0, [0, 1, 2]]]},
    {"k": "state", "lost": [], "next": float("nan"), "views": [[0, [0, 1, 2]]]},
]


def test_absurd_losses_and_views_are_counted_and_dropped() -> None:
    with star(3, outlive=True) as s:
        for message in ABSURD:
            s.controls[0]._star.send(message, 1)
        until(lambda: s.controls[1].foreign >= len(ABSURD) - 1)  # only hubs read "next"
        s.controls[1]._star.send(ABSURD[-1])
        until(lambda: s.controls[0].foreign == 1)
        assert not any(note.log for note in s.notes)
        s.controls[2].close()
        assert view_of(s, 0, 1) == (11, (0, 1))


def test_a_broken_connection_is_noticed_though_the_router_learns_of_it_later() -> None:
    with star(3) as s:
        hub = s.controls[0]._star
        send, late = hub.send, [5]

        def unaware(message: dict[str, Any], rank: int | None = None) -> bool:
            if not send(message, rank) and rank == 2 and message["k"] == "beat":
                late[0] -= 1
                return late[0] >= 0
            return True

        hub.send = unaware  # type: ignore[method-assign]
        s.controls[2].close()
        until(lambda: all(("dead", 2) in s.notes[rank].log for rank in (0, 1)))
        assert late[0] < 0
