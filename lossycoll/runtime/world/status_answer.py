"""Answers to queries for a job's status, and their reading at the other end.

An answer is several messages, each a JSON array: ``["status", version, session, places, records]``,
then as many ``["record", fields]`` as it says, one for each process of the job on the rank's
machine. docs/operate.md has the fields.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lossycoll.runtime.core.stacks import python_stacks
from lossycoll.runtime.engine.status_record import MOST_ENTRIES, MOST_TEXT, Record

from .messages import Malformed

VERSION: Final = 1
STATUS, CALLS, STACKS = QUESTIONS = "status", "calls", "stacks"
"""What a hello may ask for. CALLS is STATUS with the latest calls of each group."""
FRESH_SECONDS: Final = 0.05
"""An answer is given again for so long: whoever asks in a loop costs the rank little."""

Place = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Head:
    """The first message of an answer.

    Attributes:
        session: The job's.
        places: Where each rank's control plane listens.
        records: How many records follow.
    """

    session: str
    places: tuple[Place, ...]
    records: int


class Answers:
    """One rank's answers. Used by the control plane's thread.

    Args:
        session: The job's, as pages have it.
        places: Where each rank listens.
        read: The records of the job on this machine, with their calls or without.
    """

    def __init__(
        self, session: str, places: Sequence[Place], read: Callable[[bool], Sequence[Record]]
    ) -> None:
        self._session = session
        self._places = places
        self._read = read
        self._until = [0.0, 0.0]
        self._kept: list[list[bytes]] = [[], []]

    def to(self, purpose: str) -> list[bytes]:
        """The messages that answer a question."""
        if purpose == STACKS:
            return [_packed(["stacks", python_stacks()])]
        now, calls = time.monotonic(), purpose == CALLS
        if now >= self._until[calls]:
            try:
                records = self._read(calls)
            except OSError:  # somebody has changed the folder
                records = ()
            bodies = [_packed(["record", one.to_json()]) for one in records]
            places = [list(place) for place in self._places]
            head = _packed(["status", VERSION, self._session, places, len(bodies)])
            self._kept[calls], self._until[calls] = [head, *bodies], now + FRESH_SECONDS
        return self._kept[calls]


def _packed(message: list[Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def _list(body: bytes, kind: str, fields: int) -> list[Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"no JSON: {error}") from None
    if type(found) is not list or len(found) != fields + 1 or found[0] != kind:
        raise Malformed(f"no {kind}")
    return found


def read_head(body: bytes) -> Head:
    """The first message.

    Raises:
        Malformed: It is none.
    """
    _, version, session, places, records = _list(body, "status", 4)
    if version != VERSION:
        raise Malformed(f"status of version {version!r:.20}, wanted {VERSION}")
    if type(session) is not str or len(session) != 16 or type(places) is not list:
        raise Malformed("no job")
    if type(records) is not int or not 0 <= records <= len(places) <= MOST_ENTRIES:
        raise Malformed("more records than ranks")
    return Head(session, tuple(_place(one) for one in places), records)


def _place(value: Any) -> Place:
    if type(value) is not list or len(value) != 2:
        raise Malformed("no place")
    host, port = value
    if type(host) is not str or type(port) is not int or not 0 < port < 1 << 16:
        raise Malformed("no place")
    return host[:MOST_TEXT], port


def read_record(body: bytes) -> Record:
    """One of the messages that follow.

    Raises:
        Malformed: It is none.
    """
    try:
        return Record.from_json(_list(body, "record", 1)[1])
    except ValueError as error:
        raise Malformed(str(error)) from None


def read_stacks(body: bytes) -> str:
    """The answer to ``STACKS``, without what would move a terminal's cursor.

    Raises:
        Malformed: It is none.
    """
    text = _list(body, "stacks", 1)[1]
    if type(text) is not str:
        raise Malformed("no stacks")
    return "".join(one if one.isprintable() or one == "\n" else "?" for one in text)
