"""What the next coordinator has to hear again."""

from __future__ import annotations

import pytest

from lossycoll.runtime.world import world_protocol
from lossycoll.runtime.world.messages import Addressed
from lossycoll.runtime.world.world_protocol import ReplayLog


def message(sender: int, to: int, text: str) -> Addressed:
    return Addressed(sender, to, 7, ["abort", text, "EngineError"])


def test_what_is_said_once_is_known_and_told_again() -> None:
    made = ReplayLog(20.0)
    assert made.note(message(1, 0b101, "a"), 0.0)
    assert made.note(message(2, 0b011, "b"), 1.0)
    assert made.note(message(1, 0b101, "c"), 2.0)
    assert not made.note(message(1, 0b101, "a"), 3.0), "a repetition"
    assert [one.body[1] for one in made.kept(4.0)] == ["a", "b", "c"]


def test_what_is_old_is_forgotten() -> None:
    made = ReplayLog(20.0)
    made.note(message(1, 1, "a"), 0.0)
    made.note(message(1, 1, "b"), 15.0)
    assert [one.body[1] for one in made.kept(30.0)] == ["b"]
    assert made.kept(36.0) == []


def test_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_protocol, "MOST_REPLAYED", 10)
    made = ReplayLog(20.0)
    for number in range(100):
        made.note(message(1, 1, str(number)), 0.0)
    kept = [int(one.body[1]) for one in made.kept(0.0)]
    assert len(kept) < 10
    assert kept[-1] == 99
