"""Real planes when the coordinator leaves or dies, when a thread fails, or when a close is cut
short."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.world.connections import Alive
from tests.support.planes import LIVENESS, Planes, planes, quiet, view_of, views
from tests.support.waiting import until


def without_coordinator(s: Planes) -> None:
    """Rank 0 leaves in order, and the rest are alone."""
    s.groups[0].leave(5)
    until(lambda: all(note.log for note in s.notes[1:]))
    s.groups[0].close()


@pytest.mark.parametrize("outlive", [False, True])
def test_a_death_after_rank_0_has_left_is_noticed(outlive: bool) -> None:
    with planes(4, outlive=outlive) as s:
        without_coordinator(s)
        s.die(2)
        what = ("lost" if outlive else "dead", 2)
        until(lambda: all(what in s.notes[rank].log for rank in (1, 3)))
        if outlive:
            until(lambda: all(views(s, rank)[-1:] == [(13, (1, 3))] for rank in (1, 3)))
        else:
            assert s.notes[1].log == s.notes[3].log == [("bye", 0, 5), what]


def test_a_silence_after_rank_0_has_left_is_noticed() -> None:
    with planes(3, LIVENESS) as s:
        without_coordinator(s)
        until(lambda: 2 in s.planes[1].protocol.welcomed)
        s.silence(2)
        until(lambda: s.notes[1].log == [("bye", 0, 5), ("dead", 2)], seconds=3 * LIVENESS)


def test_goodbyes_aborts_and_mismatches_after_rank_0_has_left_reach_all_once() -> None:
    with planes(4) as s:
        without_coordinator(s)
        s.groups[2].leave(6)  # maybe before anybody has found another coordinator
        s.groups[3].abort("out of memory", "EngineError")
        wanted = {("bye", 0, 5), ("bye", 2, 6), ("abort", 3, "out of memory", "EngineError")}
        until(lambda: {*s.notes[1].log} == wanted)
        until(lambda: {*s.notes[2].log} == wanted - {("bye", 2, 6)})
        s.notes[1].calls[7] = "barrier"
        s.groups[3].waiting(7, "all_reduce")
        reported = ("mismatch", 7, ((1, "barrier"), (3, "all_reduce")))
        until(lambda: all(reported in s.notes[rank].log for rank in (1, 2, 3)))
        time.sleep(0.1)
        assert all(len(note.log) == len({*note.log}) for note in s.notes[1:])


def test_what_is_said_while_the_coordinator_dies_is_said_again() -> None:
    with planes(4, outlive=True) as s:
        s.planes[0].protocol._on_message = lambda *_: None  # type: ignore[method-assign]
        s.groups[3].abort("out of memory", "EngineError")
        until(lambda: not s.planes[3]._tasks)
        s.die(0)
        reported = ("abort", 3, "out of memory", "EngineError")
        until(lambda: all(reported in s.notes[rank].log for rank in (1, 2)))


def test_who_asks_for_figures_may_become_the_coordinator_meanwhile() -> None:
    with planes(3, outlive=True) as s:
        s.planes[0].protocol._on_message = lambda *_: None  # type: ignore[method-assign]
        found: list[dict[int, Any]] = []
        asker = threading.Thread(target=lambda: found.append(s.groups[1].group_stats(60)))
        asker.start()
        until(lambda: bool(s.groups[1]._asked))
        s.die(0)
        assert view_of(s, 1, 2) == (12, (1, 2))
        asker.join(30)  # its question went with the coordinator, and is asked again
        assert found[0].keys() == {1, 2}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("rank", [0, 2])
def test_a_thread_that_fails_says_so_here_and_to_all(rank: int) -> None:
    with planes(3) as s:
        group, note = s.groups[rank], s.notes[rank]

        def on_broken(error: Exception) -> None:
            note.log.append(("broken", str(error)))
            group.abort(str(error), "EngineError")

        note.on_broken = on_broken  # type: ignore[method-assign]

        def broken(*_: Any) -> Any:
            raise OSError("a bug")

        s.planes[rank].post(broken)
        others = [other for other in s.notes if other.rank != rank]
        until(lambda: all(other.log for other in others))
        assert note.log == [("broken", "a bug")]
        assert all(other.log[0] == ("abort", rank, "a bug", "EngineError") for other in others)
        group.abort("nobody is there any more", "EngineError")
        group.close()
        thread = s.planes[rank]._thread
        assert thread is not None
        assert not thread.is_alive()


def test_who_is_silent_is_asked_over_a_new_connection() -> None:
    """As after a cut: the old connections are there, but nothing comes for long."""
    with planes(3, LIVENESS) as s:
        answers = 0
        for plane in s.planes:
            step = plane.protocol.step

            def counted(events: Any, step: Any = step) -> None:
                nonlocal answers
                answers += sum(isinstance(event, Alive) for event in events)
                step(events)

            plane.protocol.step = counted  # type: ignore[method-assign]
            plane._sockets.send = lambda *_: True  # type: ignore[method-assign]
        quiet(1.5 * LIVENESS, s.notes)
        assert answers > 0


@pytest.mark.parametrize("asker", [0, 2])
def test_new_keys_begin_each_connection_again_and_nothing_is_lost(asker: int) -> None:
    with planes(3, LIVENESS, secret=Secret.of(b"a secret of tests")) as s:

        def connections() -> dict[int, int]:
            members = dict(s.planes[0]._sockets.members)
            return {rank: link.peer for rank, link in members.items()}

        before = connections()
        s.planes[asker].rekey()
        for _ in range(20):
            s.groups[1].waiting(1, "barrier")
            time.sleep(0.01)
        until(
            lambda: (
                connections().keys() == before.keys()
                and not {*connections().items()} & {*before.items()}
            )
        )
        until(lambda: all(plane.protocol.welcomed for plane in s.planes))
        s.groups[1].abort("still here", "EngineError")
        until(lambda: bool(s.notes[0].log and s.notes[2].log))
        for note in (s.notes[0], s.notes[2]):
            assert note.log == [("abort", 1, "still here", "EngineError")]


def test_new_keys_that_are_asked_for_while_a_connection_begins_again_are_every_ranks() -> None:
    """As by two commands one after the other."""
    with planes(3, LIVENESS, secret=Secret.of(b"a secret of tests")) as s:
        renewed: list[int] = []
        for rank, plane in enumerate(s.planes):
            plane.protocol.on_rekey = lambda rank=rank: renewed.append(rank)  # type: ignore[misc]
        asker = s.planes[2]
        follow = asker._sockets.follow

        def follow_and_ask(*words: Any) -> None:
            follow(*words)
            if renewed.count(2) < 3:
                asker.rekey()

        asker._sockets.follow = follow_and_ask  # type: ignore[method-assign]
        asker.rekey()
        until(lambda: renewed.count(2) == 3)
        # Where connecting takes long, the others hear of two wishes at once.
        until(lambda: {0, 1} <= {*renewed[len(renewed) - renewed[::-1].index(2) :]})


def test_coordinators_may_die_one_after_another() -> None:
    with planes(4, LIVENESS, outlive=True) as s:
        s.die(0)
        view_of(s, 1, 2, 3)
        for note in s.notes:
            note.next = 50 - note.rank
        s.die(1)
        assert view_of(s, 2, 3, since=2) == (48, (2, 3))
        s.die(2)
        # One of two isn't the larger part; but a process that has ended isn't a part.
        assert view_of(s, 3, since=3) == (48, (3,))


def test_a_coordinator_that_ends_with_others_is_followed_at_once() -> None:
    """Whoever takes its place has no connection yet whose end would tell of theirs."""
    with planes(7, outlive=True) as s:
        for rank in (0, 2, 3, 4, 5):
            s.die(rank)
        until(lambda: all(views(s, rank)[-1:] == [(16, (1, 6))] for rank in (1, 6)))
        assert views(s, 1) == views(s, 6)
