"""Waits for calls that take long, and for results that come before the end."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from lossycoll.errors import AbortedError, LossyError
from lossycoll.options.fields import Options
from lossycoll.runtime.core import call as call_module
from lossycoll.runtime.core.call import ASK_SECONDS, CallOptions, Collective, LongWait, Operation
from lossycoll.runtime.engine.failures import Code, Where
from tests.support.instructions import interrupted


def test_a_wait_asks_about_its_call_once_it_takes_long_and_then_again() -> None:
    first, again = ASK_SECONDS
    call = Collective("barrier")
    asked: list[Collective] = []
    wait = LongWait(asked.append, call, 50.0)
    answers = []
    late = 50.0 + first + 5 * again  # nobody looked meanwhile
    for now in (
        50.0,
        50.0 + 0.9 * first,
        50.0 + first,
        50.0 + first + 0.9 * again,
        late,
        late + 0.9 * again,
        late + again,
    ):
        wait.ask_if_due(now)
        answers.append(len(asked))
    assert answers == [0, 0, 1, 1, 2, 2, 3]
    assert set(asked) == {call}


@pytest.mark.parametrize(("name", "text"), [("all_reduce", "an all_reduce"), ("send", "a send")])
def test_a_call_without_a_number_has_an_article(name: str, text: str) -> None:
    assert Collective(name).numbered == text
    assert str(Where(0, 2, call=name)) == f"rank 0/2: {text}"


class Kept:
    """Memory that an operation keeps."""


class Engine:
    """A submitter whose operation goes on as a test says: codes of the result, and of the end."""

    def __init__(self, error: LossyError | None = None) -> None:
        self.result: int = Code.PENDING
        self.end: int = Code.PENDING
        self.error = error
        self.released = 0

    def wait_ticket(self, ticket: int, seconds: float) -> int:
        return self.end

    def wait_result(self, operation: Operation, seconds: float) -> int:
        return self.end if self.result == Code.PENDING else self.result

    def take(self, operation: Operation) -> LossyError | None:
        return self.error

    def release(self, operation: Operation) -> None:
        self.released += 1

    def note_waiting(self, call: Collective) -> None:
        """Nobody is there to be asked."""

    def where(self, operation: Operation) -> Where:
        return Where(0, 2)


def submitted(engine: Engine, **call_options: Any) -> Operation:
    return Operation(engine, Collective("all_gather"), CallOptions(Options(), **call_options), 1.0)


def test_a_result_may_come_before_the_end_and_memory_is_kept_until_then() -> None:
    engine, kept = Engine(), Kept()
    alive = weakref.ref(kept)
    operation = submitted(engine, keep=kept)
    del kept
    engine.result = Code.OK
    operation.wait_result()
    assert (operation.shown, operation.done, engine.released) == (True, False, 0)
    assert not operation.poll()
    assert alive() is not None
    engine.end = Code.OK
    operation.wait()
    operation.wait_result()
    assert (operation.done, engine.released) == (True, 1)
    assert alive() is None


def test_a_result_that_is_still_to_be_copied_comes_with_the_end() -> None:
    for at_end in ({"epilogue": lambda: None}, {"among": lambda ranks: None}):
        engine = Engine()
        operation = submitted(engine, **at_end)
        engine.result = Code.OK
        engine.end = Code.OK
        operation.wait_result()
        assert operation.done
        assert not operation.shown


def test_a_failure_is_raised_by_whoever_waits_for_what_it_ended() -> None:
    error = AbortedError("rank 0/2: ended")
    early, late = Engine(error), Engine(error)
    early.end = Code.ABORTED
    operation = submitted(early)
    with pytest.raises(AbortedError, match="ended"):
        operation.wait_result()
    assert operation.done
    late.result = Code.OK
    operation = submitted(late)
    operation.wait_result()
    late.end = Code.ABORTED
    with pytest.raises(AbortedError, match="ended"):
        operation.wait()
    operation.wait_result()
    assert late.released == 1


def test_a_handler_may_complete_on_top_of_whoever_does() -> None:
    """As one does that ends the group."""
    number = 1
    while True:
        engine, finished = Engine(), []
        engine.end = Code.OK
        operation = submitted(engine, epilogue=lambda: finished.append(1))  # noqa: B023
        handler, body = operation.complete, operation.wait
        if not interrupted(number, call_module, handler, body):
            break
        assert operation.done
        assert finished == [1], number
        assert engine.released, number
        number += 1
    assert number > 100, "instructions were to be traced"
