"""A job's status from all of its machines, also from those that are far away."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from lossycoll.runtime.control.events import Received
from lossycoll.runtime.control.schema import Address
from lossycoll.runtime.control.transport import Transport
from lossycoll.runtime.engine.status_record import Record
from lossycoll.runtime.world import queries
from lossycoll.runtime.world.queries import Answers
from tests.runtime.world.test_job_status import WORLD, record

SESSION = "ab" * 8
LATE = 0.4
"""Seconds that an answer takes: more than any rank beside this one."""


class Rank:
    """A rank that answers for the processes of its machine, after some seconds."""

    def __init__(self, address: str, tells: Sequence[int], seconds: float = 0.0) -> None:
        self._listener = socket.create_server((address, 0))
        self.place: Address = self._listener.getsockname()
        self.places: Sequence[Address] = ()
        self.asked = 0
        self._tells, self._seconds = tells, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer)

    def start(self, places: Sequence[Address]) -> None:
        self.places = places
        self._thread.start()

    def _answer(self) -> None:
        answers = Answers(SESSION, self.places, lambda _: self._records())
        with contextlib.closing(Transport()) as transport:
            transport.listen(self._listener)
            while not self._ended.is_set():
                for event in transport.poll(0.01):
                    if isinstance(event, Received):
                        self.asked += 1
                        time.sleep(self._seconds)
                        for body in answers.to(queries.STATUS):
                            transport.send(event.peer, body)

    def _records(self) -> list[Record]:
        return [replace(record(number, 7), session=SESSION) for number in self._tells]

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


def test_far_machines_tell_and_of_each_one_rank_is_asked() -> None:
    ranks = [
        Rank("127.0.0.1", [0]),
        Rank("127.0.0.2", [1, 2], LATE),
        Rank("127.0.0.2", [1, 2], LATE),
        Rank("127.0.0.3", [3], LATE),
    ]
    assert len(ranks) == WORLD
    for one in ranks:
        one.start([other.place for other in ranks])
    try:
        session, places, records = queries.ask_job(*ranks[0].place, None, 30.0)
    finally:
        for one in ranks:
            one.close()
    assert (session, list(places)) == (SESSION, [one.place for one in ranks])
    assert sorted(one.process for one in records) == list(range(WORLD))
    assert [one.asked for one in ranks] == [1, 1, 0, 1]


def test_a_rank_that_is_silent_is_told_of_by_its_neighbour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nobody waits for it then."""
    monkeypatch.setattr(queries, "OTHERS_SECONDS", 1.0)
    first, neighbour = Rank("127.0.0.1", [0]), Rank("127.0.0.2", [1, 2, 3])
    with socket.create_server(("127.0.0.2", 0)) as stopped:
        silent: Address = stopped.getsockname()
        places = [first.place, silent, neighbour.place, silent]
        for one in (first, neighbour):
            one.start(places)
        try:
            _, _, records = queries.ask_job(*first.place, None, 30.0)
        finally:
            for one in (first, neighbour):
                one.close()
    assert sorted(one.process for one in records) == list(range(WORLD))
    assert neighbour.asked == 1
