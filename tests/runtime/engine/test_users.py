"""What is used is freed once, when nobody is inside, whoever closes it and whenever."""

from __future__ import annotations

import threading

import pytest

from lossycoll.errors import ClosedError
from lossycoll.runtime.engine import users
from lossycoll.runtime.engine.failures import Where
from lossycoll.runtime.engine.users import Users
from tests.support.instructions import interrupted


def closed_at(number: int) -> tuple[bool, list[str]]:
    """Enters and leaves, and closes on top of one of the instructions of that. Returns whether
    there is such an instruction, and what happened."""
    found: list[str] = []
    one = Users(Where(0, 2), lambda: found.append("freed"))

    def use() -> None:
        try:
            with one:
                found.append("in")
            found.append("out")
        except ClosedError:
            found.append("refused")

    there = interrupted(number, users, lambda: one.close(lambda: found.append("ended")), use)
    return there, found


def test_a_handler_that_closes_on_top_of_any_instruction_frees_once_when_all_are_out() -> None:
    number, ways = 1, set()
    while True:
        there, found = closed_at(number)
        if not there:
            break
        ways.add(tuple(found))
        number += 1
    assert number > 40, "instructions were to be traced"
    assert ways == {
        ("ended", "freed", "refused"),
        ("ended", "in", "freed", "out"),
        ("in", "ended", "freed", "out"),
    }


def test_one_who_closes_waits_for_other_threads_and_refuses_more() -> None:
    freed: list[bool] = []
    one = Users(Where(0, 2), lambda: freed.append(inside))
    inside, told, go = False, threading.Event(), threading.Event()

    def use() -> None:
        nonlocal inside
        with one:
            inside = True
            told.set()
            assert go.wait(60)
            inside = False

    thread = threading.Thread(target=use)
    thread.start()
    assert told.wait(60)
    one.close(go.set)
    assert freed == [False]
    thread.join()
    with pytest.raises(ClosedError), one:
        pass
    one.close(lambda: freed.append(True))
    assert freed == [False], "once"
