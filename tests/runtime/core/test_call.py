"""Waits for calls that take long."""

from __future__ import annotations

from lossycoll.runtime.core.call import ASK_SECONDS, Collective, LongWait


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
