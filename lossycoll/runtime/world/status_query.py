"""Asks the ranks of a job for their status: one, and then those that it doesn't know all of.

The asker is no rank. Each rank answers for itself and for the others on its machine, whose pages it
reads; so a rank that can't answer is told of by its neighbours.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterable
from typing import Final

from lossycoll.runtime.control.curve import keys_of
from lossycoll.runtime.control.events import Closed, Received, Refused
from lossycoll.runtime.control.schema import Address, Malformed
from lossycoll.runtime.control.transport import CLOSED_UNHEARD, Transport
from lossycoll.runtime.engine.status_record import Record
from lossycoll.runtime.keys.secret import Secret

from .connections import PLANE
from .messages import VERSION, Hello, pack
from .status_answer import STACKS, STATUS, Status, read_record, read_stacks, read_status

FIRST_SECONDS: Final = 2.0
"""For the rank that is named, which may be far away."""
OTHERS_SECONDS: Final = 0.1
"""For each further round of ranks that haven't been told of yet."""
TRIES: Final = 3
"""Of the rank that is named: a listener that strangers crowd may close a connection that is new."""


class NoAnswer(OSError):
    """Whatever listens there gives no answer that can be read."""


class Query:
    """Connections of an asker; ``close`` at the end. ``secret``: the job's; None: it has none."""

    def __init__(self, secret: Secret | None) -> None:
        self._transport = Transport(None if secret is None else keys_of(secret, PLANE))

    def close(self) -> None:
        self._transport.close(0)

    def ask(
        self,
        places: Iterable[Address],
        purpose: str,
        seconds: float,
        take: Callable[[Address, bytes], bool],
    ) -> dict[Address, str]:
        """Asks all places at once. ``seconds``: how long to wait for all of them. ``take``: takes a
        message of a place; returns whether that was its last one. It may raise Malformed. Returns
        the places without a whole answer, and why."""
        end = time.monotonic() + seconds
        open_ones: dict[int, Address] = {}
        failed: dict[Address, str] = {}
        for place in places:
            try:
                peer = self._transport.connect(place)
            except OSError as error:
                failed[place] = error.strerror or str(error)
                continue
            open_ones[peer] = place
            self._transport.send(peer, pack(Hello(VERSION, "", 0, purpose)))
        while open_ones and (left := end - time.monotonic()) > 0:
            for event in self._transport.poll(left):
                place = open_ones.get(getattr(event, "peer", -1), ("", 0))
                if not place[1]:
                    continue
                why = ""
                if isinstance(event, Received):
                    try:
                        if not take(place, event.body):
                            continue
                    except Malformed as error:
                        why = str(error)
                elif isinstance(event, Refused):
                    why = os.strerror(errno.ECONNREFUSED).lower()
                elif isinstance(event, Closed):
                    why = event.why
                else:
                    continue
                del open_ones[event.peer]
                self._transport.drop(event.peer)
                if why:
                    failed[place] = why
        for peer, place in open_ones.items():
            self._transport.drop(peer)
            failed[place] = "no answer"
        return failed


def ask_job(
    host: str,
    port: int,
    secret: Secret | None,
    seconds: float = FIRST_SECONDS,
    purpose: str = STATUS,
) -> tuple[str, tuple[Address, ...], list[Record]]:
    """The job of the rank that listens there.

    ``secret``: the job's; None: it has none. ``seconds``: how long to wait for that rank.
    ``purpose``: STATUS, or CALLS for records with the latest calls. Returns the job's session,
    where its ranks listen, and a record of each that could be had. NoAnswer: nothing is learnt
    there; the text says why. OSError: nobody listens there, or there is no such host.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    first = (str(found[0]), int(found[1]))
    reader = _Reader()
    with contextlib.closing(Query(secret)) as query:
        end = time.monotonic() + seconds
        for _ in range(TRIES):
            failed = query.ask([first], purpose, end - time.monotonic(), reader.take)
            if reader.head is not None or failed.get(first) != CLOSED_UNHEARD:
                break
        if reader.head is None:
            why = failed.get(first, "no answer")
            if why == os.strerror(errno.ECONNREFUSED).lower():
                raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            raise NoAnswer(why)
        asked: set[Address] = {first}
        while wanted := [place for place in reader.untold() if place not in asked]:
            asked |= set(wanted)
            query.ask(wanted, purpose, OTHERS_SECONDS, reader.take)
    return reader.head.session, reader.head.addresses, list(reader.records.values())


class _Reader:
    """Puts answers together."""

    def __init__(self) -> None:
        self.head: Status | None = None
        self.records: dict[int, Record] = {}
        self._left: dict[Address, int] = {}

    def take(self, place: Address, body: bytes) -> bool:
        if place not in self._left:
            head = read_status(body)
            if self.head is None:
                self.head = head
            elif head.session != self.head.session:
                raise Malformed(f"of another job, {head.session}")
            self._left[place] = head.records
        else:
            record = read_record(body)
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
    """The Python stacks of the rank that listens there. NoAnswer: it doesn't tell; the text says
    why."""
    texts: list[str] = []

    def take(_: Address, body: bytes) -> bool:
        texts.append(read_stacks(body))
        return True

    with contextlib.closing(Query(secret)) as query:
        failed = query.ask([place], STACKS, seconds, take)
    if not texts:
        raise NoAnswer(failed.get(place, "no answer"))
    return texts[0]


def ask_rank(
    place: Address, secret: Secret | None, seconds: float = 0.5
) -> tuple[Record | None, str | None]:
    """The record and the Python stacks of the rank that listens there, as far as it tells them."""
    reader, texts = _Reader(), list[str]()

    def take(_: Address, body: bytes) -> bool:
        texts.append(read_stacks(body))
        return True

    with contextlib.suppress(OSError), contextlib.closing(Query(secret)) as query:
        query.ask([place], STATUS, seconds, reader.take)
        if reader.head is not None:
            query.ask([place], STACKS, seconds, take)
            at = reader.head.addresses.index(place) if place in reader.head.addresses else -1
            return reader.records.get(at), texts[0] if texts else None
    return None, None
