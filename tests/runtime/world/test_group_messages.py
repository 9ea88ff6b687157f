"""Messages of groups that aren't open here yet, that are, and that were."""

from __future__ import annotations

from typing import Any

import pytest

from lossycoll.runtime.control.schema import Malformed
from lossycoll.runtime.world import membership
from lossycoll.runtime.world.membership import GroupMessages
from lossycoll.runtime.world.messages import Addressed


class Taker:
    def __init__(self, group: int) -> None:
        self.group = group
        self.log: list[tuple[int, list[Any]]] = []

    def take(self, process: int, packed: list[Any]) -> None:
        if packed[0] == "bad":
            raise Malformed("bad")
        self.log.append((process, packed))


def message(group: int, number: int, kind: str = "bye") -> Addressed:
    return Addressed(number, 1, group, [kind, number, ""])


def test_nothing_is_kept_for_a_group_that_ended_before_it_was_open() -> None:
    made: Any = GroupMessages()
    made.deliver(message(7, 0))
    made.deliver(message(8, 0))
    made.close(Taker(7))
    made.deliver(message(7, 1))
    eight = Taker(8)
    made.open(eight)
    assert len(eight.log) == 1
    assert (made.foreign, len(made._early)) == (0, 0)


def test_what_is_malformed_is_counted() -> None:
    made: Any = GroupMessages()
    made.deliver(message(7, 0, "bad"))
    seven = Taker(7)
    made.open(seven)
    made.deliver(message(7, 1, "bad"))
    made.deliver(message(7, 2))
    assert [process for process, _ in seven.log] == [2]
    assert made.foreign == 2


def test_what_is_kept_for_groups_to_come_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MOST_EARLY", 10)
    monkeypatch.setattr(membership, "MOST_ENDED", 2)
    made: Any = GroupMessages()
    for number in range(30):
        made.deliver(message(7, number))
    assert made.foreign == 20
    seven = Taker(7)
    made.open(seven)
    assert [process for process, _ in seven.log] == list(range(20, 30))
    for group in (7, 8, 9):
        taker = seven if group == 7 else Taker(group)
        made.open(taker)
        made.close(taker)
    made.deliver(message(9, 0))
    assert not made._early
    made.deliver(message(7, 0))  # so long ago that it isn't remembered
    assert len(made._early) == 1
