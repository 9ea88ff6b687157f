"""A rank's wait for the others, with a plane that is told what happens when."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from lossycoll.backend.meeting import Meeting
from lossycoll.errors import RendezvousError


class Plane:
    """A coordinator's, of which the last rank comes between two questions, or never."""

    liveness = 10.0

    def __init__(self, *, comes: bool) -> None:
        self._comes = comes
        self.asked = 0
        self.protocol = SimpleNamespace(welcomed=(0, 1))

    def meet(self, seconds: float) -> bool:
        self.asked += 1
        return self.asked > 1 and self._comes

    @property
    def has_met(self) -> bool:
        return self._comes

    has_met_or_failed = True

    def missing(self) -> list[int]:
        return []

    def sources(self) -> dict[int, str]:
        return {}


def meeting(plane: Plane) -> Meeting:
    rendezvous = SimpleNamespace(
        check_followed=lambda: None, tell=lambda *_: None, parted=lambda: None
    )
    builder: Any = SimpleNamespace(
        spec=SimpleNamespace(rank=0, size=2, timeout=timedelta(seconds=5)),
        plane=plane,
        rendezvous=rendezvous,
        secret=None,
        who="rank 0/2",
    )
    health: Any = SimpleNamespace(failure=None)
    return Meeting(builder, health, {})


def test_ranks_that_meet_just_after_a_wait_gave_up_have_met() -> None:
    plane = Plane(comes=True)
    meeting(plane).wait()
    assert plane.asked == 2


def test_a_meeting_that_failed_names_a_cause_also_where_nobody_is_missing() -> None:
    with pytest.raises(RendezvousError, match="hasn't heard all other ranks"):
        meeting(Plane(comes=False)).wait()
