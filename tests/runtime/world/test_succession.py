"""Who is the coordinator next, and what it has to hear again."""

from __future__ import annotations

import pytest

from lossycoll.runtime.world import failover
from lossycoll.runtime.world.failover import ReplayLog, Succession
from lossycoll.runtime.world.messages import Addressed, Follow, Welcome


def test_the_coordinator_is_the_lowest_that_is_here() -> None:
    made = Succession(2, 4)
    assert made.coordinator == 0
    assert not made.succeed(), "nobody is gone"
    assert made.lose(1, ended=True)
    assert not made.succeed()
    assert made.leave(0)
    assert made.succeed()
    assert made.coordinator == 2
    assert made.is_coordinator
    assert made.others == [3]


def test_who_is_gone_is_gone_once_and_this_rank_never() -> None:
    made = Succession(1, 3)
    assert made.leave(0)
    assert not made.lose(0, ended=True)
    assert not made.leave(0)
    assert not made.lose(1, ended=True)
    assert not made.leave(1)
    assert made.others == [2]


def test_a_new_coordinator_hears_who_is_gone_and_tells_it() -> None:
    made = Succession(3, 6)
    made.lose(0, ended=True)
    made.lose(1, ended=False)
    made.leave(5)
    assert made.follow() == Follow((0, 1), (0,), (5,))
    assert made.welcome(ready=True) == Welcome((0, 1), (0,), (5,), True)


def message(sender: int, to: int, text: str) -> Addressed:
    return Addressed(sender, to, 7, ["abort", text, "EngineError"])


def test_what_is_said_once_is_known_and_told_again() -> None:
    made = ReplayLog(20.0)
    assert made.note(message(1, 0b101, "a"), 0.0)
    assert made.note(message(2, 0b011, "b"), 1.0)
    assert made.note(message(1, 0b101, "c"), 2.0)
    assert not made.note(message(1, 0b101, "a"), 3.0), "a repetition"
    assert [one.body[1] for one in made.of(1, 4.0)] == ["a", "c"]
    assert [one.body[1] for one in made.to(0, 4.0)] == ["a", "b", "c"]
    assert [one.body[1] for one in made.to(1, 4.0)] == ["b"], "not its own"
    assert [one.body[1] for one in made.to(2, 4.0)] == ["a", "c"]


def test_what_is_old_is_forgotten() -> None:
    made = ReplayLog(20.0)
    made.note(message(1, 1, "a"), 0.0)
    made.note(message(1, 1, "b"), 15.0)
    assert [one.body[1] for one in made.of(1, 30.0)] == ["b"]
    assert made.of(1, 36.0) == []


def test_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "MOST_REPLAYED", 10)
    made = ReplayLog(20.0)
    for number in range(100):
        made.note(message(1, 1, str(number)), 0.0)
    kept = [int(one.body[1]) for one in made.of(1, 0.0)]
    assert len(kept) < 10
    assert kept[-1] == 99
