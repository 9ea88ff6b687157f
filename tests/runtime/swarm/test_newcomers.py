"""Whom a directory that nobody owns takes in just after its start: by its service alone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from lossycoll.runtime.swarm.directory import Directory
from lossycoll.runtime.swarm.directory_list import BEGIN_SECONDS
from lossycoll.runtime.swarm.partition_merge import ASK_SECONDS, PartitionMerge
from lossycoll.runtime.swarm.protocol import (
    Directories,
    DirectoryStatus,
    Heartbeat,
    Joined,
    Message,
    Peers,
    Who,
    pack,
    unpack,
)
from lossycoll.runtime.swarm.service import DirectoryService
from tests.runtime.swarm.test_directory import join

OLD = "7" * 16
"""Session of the peers that a former directory at this place had."""
ELECTED = "10.0.0.9", 7000
LONG = 1000.0
"""Seconds that a test doesn't last."""


@dataclass
class End:
    """The directory's end of a connection."""

    broken: str = ""
    reached: bool = True
    came: list[bytes] = field(default_factory=list)
    told: list[Message] = field(default_factory=list)

    def read(self) -> list[bytes]:
        found, self.came = self.came, []
        return found

    def write(self, body: bytes) -> None:
        self.told.append(unpack(body))

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class Started:
    """A directory that has just started, and may be the second one at its place."""

    def __init__(self, waits: float) -> None:
        self.directory = Directory(time.monotonic)
        self.service = DirectoryService(
            self.directory,
            merge=PartitionMerge(time.monotonic, self.directory),
            waits=waits,
        )

    def answers(self, message: Message) -> Message:
        """What it says to the first message of a connection."""
        end = End(came=[pack(message)])
        session = self.service.admit(end, place=lambda: ("10.0.0.1", 7000))
        self.service.hear(session)
        return end.told[0]


def test_a_newcomer_waits_for_those_that_were_here_before() -> None:
    started = Started(LONG)
    for question in (join("new"), Heartbeat(0)):
        assert started.answers(question) == Directories(())
    assert started.answers(Who()) == Peers((), 0)
    former = started.answers(join("old", number=3, session=OLD, round=7))
    assert isinstance(former, Joined)
    assert (former.number, former.session, former.round) == (3, OLD, 7)
    assert started.answers(Heartbeat(0)) == Heartbeat(1)
    newcomer = started.answers(join("new"))
    assert isinstance(newcomer, Joined)
    assert newcomer.session == OLD


def test_a_newcomer_is_sent_to_the_directory_that_they_have_elected() -> None:
    started = Started(LONG)
    status = DirectoryStatus(OLD, "5c" * 16, 1, 3, 9, 7, "", "same", *ELECTED, 0)
    started.answers(status)
    assert started.answers(join("new")) == Directories((ELECTED,))
    assert 1.25 * ASK_SECONDS < BEGIN_SECONDS, "that one asks within the time"


@pytest.mark.parametrize("waits", [0.0, LONG])
def test_without_any_a_newcomer_begins_a_swarm(waits: float) -> None:
    started = Started(waits)
    if waits:
        assert started.answers(join("new")) == Directories(())
        started.service._waits_until = time.monotonic()
    assert isinstance(started.answers(join("new")), Joined)
