"""The control plane when its hub leaves or dies, its thread fails, or a close is cut short."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from lossycoll.options.fields import Options
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.membership.group_state import Health
from tests.runtime.membership.test_failure_detector import (
    LIVENESS,
    Group,
    quiet,
    star,
    until,
    view_of,
    views,
)


def without_hub(s: Group) -> None:
    """Rank 0 leaves in order, and the rest are alone."""
    s.controls[0].leave(5)
    until(lambda: all(note.log for note in s.notes[1:]))
    s.controls[0].close()


@pytest.mark.parametrize("outlive", [False, True])
def test_a_death_after_rank_0_has_left_is_noticed(outlive: bool) -> None:
    with star(4, outlive=outlive) as s:
        without_hub(s)
        s.controls[2].close()  # and says no goodbye
        what = ("lost" if outlive else "dead", 2)
        until(lambda: all(what in s.notes[rank].log for rank in (1, 3)))
        if outlive:
            until(lambda: all(views(s, rank)[-1:] == [(13, (1, 3))] for rank in (1, 3)))
        else:
            assert s.notes[1].log == s.notes[3].log == [("bye", 0, 5), what]


def test_a_silence_after_rank_0_has_left_is_noticed() -> None:
    with star(3, LIVENESS) as s:
        without_hub(s)
        until(lambda: 2 in s.controls[1]._star.routes)
        s.silence(2)
        until(lambda: s.notes[1].log == [("bye", 0, 5), ("dead", 2)], 3 * LIVENESS)


def test_goodbyes_aborts_and_mismatches_after_rank_0_has_left_reach_all_once() -> None:
    with star(4) as s:
        without_hub(s)
        s.controls[2].leave(6)  # maybe before anybody has found another hub
        s.controls[3].abort("out of memory", "EngineError")
        wanted = {("bye", 0, 5), ("bye", 2, 6), ("abort", 3, "out of memory", "EngineError")}
        until(lambda: {*s.notes[1].log} == wanted)
        until(lambda: {*s.notes[2].log} == wanted - {("bye", 2, 6)})
        s.notes[1].calls[7] = "barrier"
        s.controls[3].waiting(7, "all_reduce")
        reported = ("mismatch", 7, ((1, "barrier"), (3, "all_reduce")))
        until(lambda: all(reported in s.notes[rank].log for rank in (1, 2, 3)))
        time.sleep(0.1)
        assert all(len(note.log) == len({*note.log}) for note in s.notes[1:])


def test_ranks_that_leave_one_after_another_are_nowhere_dead() -> None:
    with star(5, LIVENESS) as s:
        for rank in range(4):
            s.controls[rank].leave(rank)
            rest = s.notes[rank + 1 :]
            until(lambda: all(("bye", rank, rank) in note.log for note in rest))  # noqa: B023
            begin = time.monotonic()
            s.controls[rank].close()
            assert time.monotonic() - begin < 5
        time.sleep(LIVENESS)
        for note in s.notes:
            assert note.log == [("bye", rank, rank) for rank in range(note.rank)]


def test_what_is_said_while_the_hub_dies_is_said_again() -> None:
    with star(4, outlive=True) as s:
        s.controls[0]._take = lambda _: None  # type: ignore[method-assign]  # it hears no more
        s.controls[3].abort("out of memory", "EngineError")
        until(lambda: not s.controls[3]._outbox)
        s.controls[0].close()
        reported = ("abort", 3, "out of memory", "EngineError")
        until(lambda: all(reported in s.notes[rank].log for rank in (1, 2)))


def test_who_asks_for_figures_may_become_the_hub_meanwhile() -> None:
    with star(3, outlive=True) as s:
        control = s.controls[1]
        star_1, asked = control._star, list[threading.Thread]()
        ended = star_1.ended

        def slow(ranks: Any) -> set[int]:
            found = ended(ranks)
            if 0 in found and not asked:
                asked.append(threading.Thread(target=control.group_figures, args=(60,)))
                asked[0].start()
                until(lambda: bool(control._outbox))
            return found

        star_1.ended = slow  # type: ignore[method-assign]
        s.controls[0].close()
        assert view_of(s, 1, 2) == (12, (1, 2))
        asked[0].join(30)
        assert not asked[0].is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("rank", [0, 2])
def test_a_thread_that_fails_says_so_here_and_to_all(rank: int) -> None:
    with star(3) as s:
        control, note = s.controls[rank], s.notes[rank]

        def on_broken(error: Exception) -> None:
            note.log.append(("broken", str(error)))
            control.abort(str(error), "EngineError")

        note.on_broken = on_broken  # type: ignore[method-assign]

        def broken() -> Any:
            raise OSError("a bug")

        control._star.disconnected = broken  # type: ignore[method-assign]
        control.waiting(1, "barrier")  # wakes it
        others = [other for other in s.notes if other.rank != rank]
        until(lambda: all(other.log for other in others))
        assert note.log == [("broken", "a bug")]
        assert all(other.log[0] == ("abort", rank, "a bug", "EngineError") for other in others)
        control.abort("nobody is there any more", "EngineError")
        control.close()
        assert control._thread is not None
        assert not control._thread.is_alive()


def test_who_is_silent_is_asked_over_a_new_connection() -> None:
    """As after a cut: the old connections are there, but nothing comes for long."""
    with star(3, LIVENESS) as s:
        questions = 0
        for control in s.controls:
            ask = control._star.ask

            def counted(ranks: list[int], patience: float, ask: Any = ask) -> None:
                nonlocal questions
                questions += len(list(ranks))
                ask(ranks, patience)

            control._star.send = lambda *_: True  # type: ignore[method-assign]
            control._star.ask = counted  # type: ignore[assignment]
        quiet(1.5 * LIVENESS, s.notes)
        assert questions > 0


def test_a_close_that_ctrl_c_cut_short_is_finished_by_the_next() -> None:
    with star(2) as s:
        control = s.controls[1]
        health = Health(
            1, 2, addresses=["a", "b"], liveness=30.0, control=control, on_failure=lambda _: None
        )
        made = Endpoint(
            health, options=Options(), group=0, timeout=9.0, engine=None, control=control
        )

        def interrupted(seconds: float) -> None:
            raise KeyboardInterrupt

        health.await_others = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            made.close()
        made.close()  # without another goodbye
        assert control._thread is not None
        assert not control._thread.is_alive()
        made.close()
        until(lambda: s.notes[0].log == [("bye", 1, -1)])
