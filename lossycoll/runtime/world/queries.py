"""Queries of a process that is no rank of a world (yet): who listens there, and how is the job?

Of a job one rank is asked for the status, then one on each further machine, and then those of which
nothing is known yet. Each rank answers for itself and for the others on its machine, whose pages it
reads; so a rank that can't answer is told of by its neighbours. An answer is a :class:`Status` and
as many records as it says; or :class:`Stacks`. docs/status-reference.md has the fields of records.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeAlias, TypeVar

from lossycoll.options.ranges import Between
from lossycoll.runtime.control.context import keys_of
from lossycoll.runtime.control.events import Closed, Received, Refused
from lossycoll.runtime.control.schema import (
    PRINTABLE,
    PRINTABLE_LINES,
    Address,
    Coded,
    Length,
    Malformed,
    Schema,
    Version,
)
from lossycoll.runtime.control.transport import CLOSED_UNHEARD, Transport
from lossycoll.runtime.engine import status_record
from lossycoll.runtime.engine.status_record import MOST_ENTRIES
from lossycoll.runtime.keys.secret import Secret

from . import messages
from .messages import PLANE, Hello, pack, unpack

VERSION: Final = 1
STATUS, CALLS, STACKS = QUESTIONS = "status", "calls", "stacks"
"""Questions that a hello may ask. CALLS is STATUS with the latest calls of each group."""
MOST_TEXT: Final = 1 << 18
OWN_THREADS: Final = "lossycoll-"
"""Names of this package's threads begin so; they wait for what happens, and are left out."""
FRESH_SECONDS: Final = 0.05
"""An answer is given again for so long: whoever asks in a loop costs the rank little."""
ANSWER_SECONDS: Final = 5.0
"""For a rank that is asked whether it lives, or for new keys."""
FIRST_SECONDS: Final = 2.0
"""For the rank that is named, which may be far away."""
OTHERS_SECONDS: Final = 2.0
"""For one rank on each further machine, which may be as far away, and again for the others that
haven't been told of then. All that is waited for is over when nobody is left to be told of."""
TRIES: Final = 3
"""Of the rank that is named: a listener that strangers crowd may close a connection that is new."""
REFUSED: Final = os.strerror(errno.ECONNREFUSED).lower()


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


# ---- those who ask ----


class NoAnswer(OSError):
    """Whatever listens there gives no answer that can be read."""


def _ask(
    secret: Secret | None,
    places: Iterable[Address],
    hello: Hello,
    seconds: float,
    take: Callable[[Address, bytes], bool],
    is_enough: Callable[[], bool] = lambda: False,
) -> dict[Address, str]:
    """Asks all places at once, and waits for ``seconds`` at most, or until ``is_enough``. ``take``
    is given a place and its message, and returns whether that was its last one; it may raise
    Malformed. Returns the places without a whole answer, and why."""
    end = time.monotonic() + seconds
    waiting: dict[int, Address] = {}
    failed: dict[Address, str] = {}
    keys = None if secret is None else keys_of(secret, PLANE)
    with contextlib.closing(Transport(keys)) as transport:
        for place in places:
            try:
                peer = transport.connect(place)
            except OSError as error:
                failed[place] = error.strerror or str(error)
                continue
            waiting[peer] = place
            transport.send(peer, pack(hello))
        while waiting and not is_enough() and (left := end - time.monotonic()) > 0:
            for event in transport.poll(left):
                if not isinstance(event, Received | Refused | Closed) or event.peer not in waiting:
                    continue
                place, why = waiting[event.peer], ""
                if isinstance(event, Received):
                    try:
                        if not take(place, event.body):
                            continue
                    except Malformed as error:
                        why = str(error)
                else:
                    why = event.why if isinstance(event, Closed) else REFUSED
                del waiting[event.peer]
                transport.drop(event.peer)
                if why:
                    failed[place] = why
    return failed | dict.fromkeys(waiting.values(), "no answer")


def _place(host: str, port: int) -> Address:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except UnicodeError as error:  # a label of the name is empty or too long
        raise OSError(f"{host!r} is no name of a host: {error}") from None
    return str(found[0]), int(found[1])


def _unanswered(why: str) -> OSError:
    if why == REFUSED:
        return OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return NoAnswer(why)


def _answer_to(hello: Hello, place: Address, seconds: float, secret: Secret | None) -> bytes:
    """The first message that answers. OSError: nobody listens there; NoAnswer: none has come."""
    found: list[bytes] = []

    def take(_: Address, body: bytes) -> bool:
        found.append(body)
        return True

    failed = _ask(secret, [place], hello, seconds, take)
    if not found:
        raise _unanswered(failed[place])
    return found[0]


def answers(
    host: str,
    port: int,
    rank: int,
    token: str,
    world: int,
    seconds: float = ANSWER_SECONDS,
    secret: Secret | None = None,
) -> bool:
    """True if ``rank`` of the world with this ``token`` still listens there, not another by now.
    Blocks for up to ``seconds`` where what listens is silent."""
    try:
        hello = Hello(messages.VERSION, token, rank, "probe")
        body = _answer_to(hello, _place(host, port), seconds, secret)
        return unpack(body, world) == Hello(messages.VERSION, token, rank, "member")
    except (OSError, Malformed):
        return False


def ask_for_rekey(host: str, port: int, secret: Secret, seconds: float = ANSWER_SECONDS) -> bool:
    """Has a world seal with new keys; True if it has heard. OSError: nobody listens there."""
    try:
        _answer_to(Hello(messages.VERSION, "", 0, "rekey"), _place(host, port), seconds, secret)
    except NoAnswer:
        return False
    return True


def ask_job(
    host: str,
    port: int,
    secret: Secret | None,
    seconds: float = FIRST_SECONDS,
    purpose: str = STATUS,
) -> tuple[str, tuple[Address, ...], list[status_record.Record]]:
    """The job of the rank that listens there.

    ``seconds``: how long to wait for that rank. ``purpose``: STATUS, or CALLS for records with the
    latest calls. Returns the job's session, where its ranks listen, and a record of each that could
    be had. NoAnswer: nothing is learnt there; the text says why. OSError: nobody listens there, or
    there is no such host.
    """
    first, hello = _place(host, port), Hello(messages.VERSION, "", 0, purpose)
    reader = _Reader()
    end = time.monotonic() + seconds
    for _ in range(TRIES):
        failed = _ask(secret, [first], hello, end - time.monotonic(), reader.take)
        if reader.head is not None or failed.get(first) != CLOSED_UNHEARD:
            break
    if reader.head is None:
        raise _unanswered(failed.get(first, "no answer"))
    asked: set[Address] = {first}
    for is_one_each in (True, False):
        wanted = [place for place in reader.untold() if place not in asked]
        if is_one_each:
            wanted = list({place[0]: place for place in reversed(wanted)}.values())
        asked |= set(wanted)
        _ask(secret, wanted, hello, OTHERS_SECONDS, reader.take, lambda: not reader.untold())
    return reader.head.session, reader.head.addresses, list(reader.records.values())


def _read(body: bytes, kind: type[_Kind]) -> _Kind:
    """One message of an answer. Malformed: it is none of this kind."""
    found = ANSWER.unpack(body)
    if not isinstance(found, kind):
        raise Malformed(f"no {kind.__name__.lower()}")
    return found


class _Reader:
    """Puts answers together."""

    def __init__(self) -> None:
        self.head: Status | None = None
        self.records: dict[int, status_record.Record] = {}
        self._left: dict[Address, int] = {}

    def take(self, place: Address, body: bytes) -> bool:
        if place not in self._left:
            head = _read(body, Status)
            if head.records > len(head.addresses):
                raise Malformed("more records than ranks")
            if self.head is None:
                self.head = head
            elif head.session != self.head.session:
                raise Malformed(f"of another job, {head.session}")
            self._left[place] = head.records
        else:
            record = _read(body, Record).fields
            assert self.head is not None
            if record.session == self.head.session and record.world == len(self.head.addresses):
                self.records.setdefault(record.process, record)
            self._left[place] -= 1
        return self._left[place] <= 0

    def untold(self) -> list[Address]:
        """Where ranks listen of which there is no record."""
        assert self.head is not None
        return [p for rank, p in enumerate(self.head.addresses) if rank not in self.records]


def ask_stacks(place: Address, secret: Secret | None, seconds: float = 0.5) -> str:
    """The Python stacks of the rank that listens there. NoAnswer: why it doesn't tell them."""
    try:
        body = _answer_to(Hello(messages.VERSION, "", 0, STACKS), place, seconds, secret)
        return _read(body, Stacks).text
    except Malformed as error:
        raise NoAnswer(str(error)) from None
    except ConnectionRefusedError:
        raise NoAnswer(REFUSED) from None


def ask_rank(
    place: Address, secret: Secret | None, seconds: float = 0.5
) -> tuple[status_record.Record | None, str | None]:
    """The record and the Python stacks of the rank that listens there, as far as it tells them."""
    reader = _Reader()
    record: status_record.Record | None = None
    stacks: str | None = None
    with contextlib.suppress(OSError):
        _ask(secret, [place], Hello(messages.VERSION, "", 0, STATUS), seconds, reader.take)
        if reader.head is not None:
            if place in reader.head.addresses:
                record = reader.records.get(reader.head.addresses.index(place))
            stacks = ask_stacks(place, secret, seconds)
    return record, stacks
