"""The control plane over real sockets: several ranks in threads of one process."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time

import pytest

from lossycoll.errors import ClosedError
from lossycoll.runtime.control.events import Closed, Event
from lossycoll.runtime.control.transport import Transport
from lossycoll.runtime.world.control_plane import ControlPlane
from lossycoll.runtime.world.membership import Membership
from lossycoll.runtime.world.messages import VERSION, Hello, pack
from tests.support.planes import (
    LIVENESS,
    TOKEN,
    Planes,
    planes,
    quiet,
)
from tests.support.waiting import until


@pytest.mark.parametrize("sender", [0, 2])
def test_an_abort_reaches_every_other_rank_once(sender: int) -> None:
    with planes(4) as s:
        s.groups[sender].abort("out of memory", "EngineError")
        others = [note for note in s.notes if note.rank != sender]
        until(lambda: all(note.log for note in others))
        time.sleep(0.05)
        for note in others:
            assert note.log == [("abort", sender, "out of memory", "EngineError")]
        assert s.notes[sender].log == []


def test_what_is_reported_right_after_meeting_reaches_even_those_that_came_last() -> None:
    made = Planes(3)
    try:
        for rank in (0, 1):
            made.start(rank)
        assert not made.planes[0].meet(0.2)
        assert made.planes[0].missing() == [2]
        assert not made.planes[1].meet(0.1)
        made.start(2)
        assert made.planes[0].meet(5)
        made.groups[0].abort("at once", "EngineError")
        made.groups[0].close()
        assert all(plane.meet(5) for plane in made.planes[1:])
        until(lambda: all(note.log for note in made.notes[1:]))
        assert [note.log for note in made.notes[1:]] == [
            [("abort", 0, "at once", "EngineError")]
        ] * 2
    finally:
        made.close()


@pytest.mark.parametrize("outlive", [False, True])
def test_nobody_waits_to_meet_a_world_that_has_been_given_up(outlive: bool) -> None:
    made = Planes(3, LIVENESS, outlive=outlive)
    try:
        for rank in (0, 1):
            made.start(rank)
        begin = time.monotonic()
        assert not any(plane.meet(60) for plane in made.planes[:2])  # rank 2 never comes
        assert time.monotonic() - begin < 30
        assert made.notes[0].log == made.notes[1].log == [("dead", 2)]
    finally:
        made.close()


def test_a_goodbye_is_heard_though_rank_0_has_said_its_own() -> None:
    for _ in range(20):
        with planes(2) as s:
            s.groups[0].leave(1)
            until(lambda: bool(s.notes[1].log))
            s.leave(1, 1)
            until(lambda: s.notes[0].log == [("bye", 1, 1)])


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_silent_rank_is_declared_dead_in_time(victim: int) -> None:
    with planes(3, LIVENESS) as s:
        quiet(1.2 * LIVENESS, s.notes)  # as long as all are heard, nobody is
        begin = time.monotonic()
        s.silence(victim)
        others = [note for note in s.notes if note.rank != victim]
        until(lambda: all(note.log for note in others), seconds=2 * LIVENESS)
        for note in others:
            assert note.log == [("dead", victim)]
            assert 0.5 * LIVENESS < note.when[0] - begin < 2 * LIVENESS
        if victim:  # rank 0 still reaches it, and says so
            until(lambda: s.notes[victim].log == [("dead", victim)])


@pytest.mark.parametrize("leaver", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_rank_that_says_goodbye_is_not_dead(leaver: int) -> None:
    with planes(3, LIVENESS) as s:
        s.leave(leaver, 41)
        others = [note for note in s.notes if note.rank != leaver]
        until(lambda: all(note.log for note in others))
        left = [rank for rank in range(3) if rank != leaver]
        # Who asks has the answers of all behind whatever else was said; test_world_protocol.py
        # waits for more than a liveness, on a clock of its own.
        assert sorted(s.groups[left[0]].group_stats(60)) == [0, 1, 2]
        assert all(note.log == [("bye", leaver, 41)] for note in others)


def test_a_mismatch_is_reported_to_all_with_both_calls() -> None:
    with planes(3) as s:
        for note in s.notes:
            note.calls[7] = "all_reduce float32[10] SUM"
        s.groups[1].waiting(7, "all_reduce float32[10] SUM")
        quiet(0.2, s.notes)
        s.notes[2].calls[7] = "barrier"
        s.groups[1].waiting(7, "all_reduce float32[10] SUM")
        until(lambda: all(note.log for note in s.notes))
        for note in s.notes:
            assert note.log[0] == (
                "mismatch",
                7,
                ((1, "all_reduce float32[10] SUM"), (2, "barrier")),
            )
        s.groups[0].waiting(9, "barrier")  # nobody is there yet
        s.groups[0].group_stats(60)  # answered by all, after that
        assert all(reported[1] == 7 for note in s.notes for reported in note.log)


def test_every_rank_can_ask_for_everybodys_figures() -> None:
    with planes(3) as s:
        for group in s.groups:
            assert group.group_stats(60) == {
                rank: {"rank": rank, "operations": 10 * rank} for rank in range(3)
            }
        s.groups[0]._stats.clear()
        s.leave(2, 1)
        until(lambda: bool(s.notes[0].log))
        begin = time.monotonic()
        assert s.groups[0].group_stats(60)[2]["operations"] == 20, "with its goodbye"
        assert time.monotonic() - begin < 30, "one that has left isn't waited for"


HOSTILE = [
    b"\x80\x04\x95pickle",
    b"null",
    b"{}",
    b"[" * 200_000,
    b'["heartbeat"]',
    pack(Hello(VERSION, "wrong", 1, "member")),
    pack(Hello(VERSION + 1, TOKEN, 1, "member")),
    pack(Hello(VERSION, TOKEN, 0, "member")),
    pack(Hello(VERSION, TOKEN, 9, "member")),
    pack(Hello(VERSION, TOKEN, 1, "admin")),
    b'["hello",3,"\\ud800",1,"member"]',
    json.dumps(["hello", VERSION, TOKEN, True, "member"]).encode(),
    os.urandom(1000),
]
"""What strangers say first: nothing of ours, or without the token."""
BROKEN = [
    b"nothing",
    b'["hello",1,"secret",1,"member"]',
    b'["dead",-1,1.0,true]',
    b'["dead",1,1.0,true]',
    b'["ready"]',
    b'["heartbeat",1]',
    b'["follow",[1,0],[],[]]',
    b'["follow",[Infinity],[],[]]',
    b'["addressed",0,"3",7,["bye",1,"",{}]]',
    b'["addressed",1,"8",7,["bye",1,"",{}]]',
    b'["addressed",1,"zz",7,["bye",1,"",{}]]',
    b'["addressed",1,"1",7,["bye",1]]',
    b'["addressed",1,"1",7,["bye",Infinity,"",{}]]',
    b'["addressed",1,"1",7,["abort",1,2]]',
    b'["addressed",1,"1",7,["mismatch","x",1,[],""]]',
    b'["addressed",1,"1",7,["heartbeat"]]',
    b'["addressed",1,"1",7,[]]',
]
"""What a rank of the world may not send to rank 0."""


def test_foreign_and_malformed_messages_are_counted_and_dropped() -> None:
    with planes(2) as s:
        coordinator = s.planes[0].protocol
        for count, data in enumerate(HOSTILE, 1):
            with contextlib.closing(Transport()) as stranger:
                peer = stranger.connect(s.endpoints[0])
                stranger.send(peer, data)
                events: list[Event] = []
                until(lambda: events.extend(stranger.poll(0.1)) or events)  # noqa: B023
                # It is hung up on, and told nothing.
                assert events == [Closed(peer, "closed by whoever listens there")], data
            assert coordinator.foreign == count, data
        for count, body in enumerate(BROKEN, len(HOSTILE) + 1):
            s.planes[1].call(lambda body=body: s.planes[1]._sockets.send(0, body))  # type: ignore[misc]
            until(lambda count=count: coordinator.foreign == count)  # type: ignore[misc]
        assert not s.notes[0].log
        assert not s.notes[1].log
        s.groups[1].abort("still here", "EngineError")
        until(lambda: bool(s.notes[0].log))
        assert s.notes[0].log == [("abort", 1, "still here", "EngineError")]


def test_threads_and_descriptors_are_given_back() -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with planes(3):
        pass
    before = count()
    for _ in range(5):
        with planes(3):
            pass
    unused = ControlPlane(1, 2, LIVENESS)
    unused.close()
    unused.close()
    assert count() == before


def test_a_process_has_one_thread_and_few_descriptors() -> None:
    """Of all planes together: libzmq's context; of each: a thread, a listener, its socket, the two
    ends of its monitor, an eventfd; and both ends of each member's connection."""

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with planes(2):
        pass
    before = count()
    with planes(4) as s:
        until(lambda: count()[0] - before[0] <= 5 + 4 * 5 + 2 * 3)  # strangers are members by now
        wanted = count()
        assert wanted[1] == before[1] + 4
        for group in range(100, 200):
            s.join(group, range(4))
        assert count() == wanted


def test_closing_while_others_post_is_safe() -> None:
    with planes(2) as s:
        stop = threading.Event()
        posted = [0, 0, 0]
        failed: list[Exception] = []

        def post(number: int) -> None:
            try:
                while not stop.is_set():
                    s.groups[1].waiting(1, "barrier")
                    posted[number] += 1
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=post, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: min(posted) > 10 or bool(failed))
        s.leave(1, 1)
        before = list(posted)
        until(lambda: all(now > then for now, then in zip(posted, before, strict=True)))
        stop.set()
        for thread in threads:
            thread.join(5)
        assert not failed
        assert not any(thread.is_alive() for thread in threads)


def test_a_plane_ends_with_its_last_membership() -> None:
    with planes(2) as s:
        more = s.join(8, [0, 1])
        s.leave(0, 1)
        assert s.planes[0].is_sound
        more[0][0].close()
        more[0][0].close()
        assert not s.planes[0].is_sound
        with pytest.raises(ClosedError, match="ending"):
            Membership(s.planes[0], 9, [0, 1])


def test_a_forked_child_closes_nothing_of_a_plane_that_is_closed() -> None:
    """Its descriptors' numbers are others' by then: of a data loader's queues, say."""
    plane = ControlPlane(0, 2, 5.0)
    plane.open("127.0.0.1", (0, 0))
    plane.close()
    pipes = [os.pipe() for _ in range(8)]  # they take the numbers that the plane had
    child = os.fork()
    if child == 0:
        try:
            for _, writer in pipes:
                os.write(writer, b"!")
        except OSError:
            os._exit(1)
        os._exit(0)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert [os.read(reader, 1) for reader, _ in pipes] == [b"!"] * len(pipes)
    finally:
        for ends in pipes:
            for end in ends:
                os.close(end)
