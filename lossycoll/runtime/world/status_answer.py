"""Answers to queries for a job's status, and their reading at the other end.

An answer is a :class:`Status` and as many records as it says, one for each process of the job on
the rank's machine; or :class:`Stacks`. docs/status-reference.md has the fields of records.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeAlias, TypeVar

from lossycoll.runtime.control.schema import (
    PRINTABLE,
    PRINTABLE_LINES,
    Address,
    Between,
    Coded,
    Length,
    Malformed,
    Schema,
    Version,
)
from lossycoll.runtime.engine import status_record
from lossycoll.runtime.engine.status_record import MOST_ENTRIES

VERSION: Final = 1
STATUS, CALLS, STACKS = QUESTIONS = "status", "calls", "stacks"
"""Questions that a hello may ask. CALLS is STATUS with the latest calls of each group."""
MOST_TEXT: Final = 1 << 18
OWN_THREADS: Final = "lossycoll-"
"""Names of this package's threads begin so; they wait for what happens, and are left out."""
FRESH_SECONDS: Final = 0.05
"""An answer is given again for so long: whoever asks in a loop costs the rank little."""


def _fields(value: Any, size: int) -> status_record.Record:
    return status_record.Record.from_json(value)


@dataclass(frozen=True, slots=True)
class Status:
    """Begin of an answer: where each rank's control plane listens; so many records follow."""

    version: Annotated[int, Version(VERSION)]
    session: Annotated[str, Length(16, 16), PRINTABLE]
    addresses: Annotated[tuple[Address, ...], Length(0, MOST_ENTRIES)]
    records: Annotated[int, Between(0, MOST_ENTRIES)]


@dataclass(frozen=True, slots=True)
class Record:
    """Record of one process, from itself or from its status page."""

    fields: Annotated[
        status_record.Record,
        Coded("an object (docs/status-reference.md)", _fields, status_record.Record.to_json),
    ]


@dataclass(frozen=True, slots=True)
class Stacks:
    """Answer to "stacks": the Python stacks of all threads."""

    text: Annotated[str, Length(0, 4 * MOST_TEXT), PRINTABLE_LINES]


Message: TypeAlias = Status | Record | Stacks
ANSWER: Final[Schema[Message]] = Schema(Message)
_Kind = TypeVar("_Kind", Status, Record, Stacks)


@dataclass(eq=False)
class Answers:
    """One rank's answers. Used by the control plane's thread."""

    session: str  # the job's, as pages have it
    addresses: Sequence[Address]  # where each rank listens
    # The records of the job on this machine, with their calls or without
    read: Callable[[bool], Sequence[status_record.Record]]
    # Latest answers, and until when they are given again
    _kept: dict[str, tuple[float, list[bytes]]] = field(default_factory=dict, init=False)

    def to(self, purpose: str) -> list[bytes]:
        """The messages that answer a question."""
        if purpose == STACKS:
            return [ANSWER.pack(Stacks(python_stacks()))]
        until, answer = self._kept.get(purpose, (0.0, []))
        if (now := time.monotonic()) >= until:
            try:
                records = self.read(purpose == CALLS)
            except OSError:  # somebody has changed the folder
                records = ()
            status = Status(VERSION, self.session, tuple(self.addresses), len(records))
            answer = [ANSWER.pack(status), *(ANSWER.pack(Record(one)) for one in records)]
            self._kept[purpose] = now + FRESH_SECONDS, answer
        return answer


def python_stacks() -> str:
    """The stack of every thread but the package's own: the main thread and outer frames first."""
    frames = sys._current_frames()
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident in sorted(frames, key=lambda one: (one != main, one)):
        if str(names.get(ident, "")).startswith(OWN_THREADS):
            continue
        stack = "".join(traceback.format_stack(frames[ident]))
        parts.append(f"thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(parts)[:MOST_TEXT]


def read(body: bytes, kind: type[_Kind]) -> _Kind:
    """One message of an answer. Malformed: it is none of this kind."""
    found = ANSWER.unpack(body)
    if not isinstance(found, kind):
        raise Malformed(f"no {kind.__name__.lower()}")
    return found
