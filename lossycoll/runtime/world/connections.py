"""A rank's control connections: who is at the other end, and what it may say (docs/control.md).

A *member* connection goes from a rank to the coordinator and carries messages both ways. A
*question* is a connection of its own to any rank: the answer is the other's hello, or that nobody
listens there any more. Before a :class:`Hello` has come, nothing is believed. Used by one thread,
but for ``open`` and ``wake``.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from lossycoll.errors import no_listener, no_port
from lossycoll.runtime.control import events as transport_events
from lossycoll.runtime.control.context import keys_of
from lossycoll.runtime.control.descriptors import listener
from lossycoll.runtime.control.schema import Malformed
from lossycoll.runtime.control.transport import STRANGERS, Transport
from lossycoll.runtime.keys.secret import Secret

from .comparison import NO_ANSWER
from .messages import PLANE, VERSION, Hello, Message, pack, unpack
from .queries import QUESTIONS, Answers
from .rank_states import RankStates

CONNECTIONS: Final = 3
"""As many of each rank may wait to be taken: its member connection, and where sites are learnt half
of the three by which each round trip is measured."""
QUESTION_SECONDS: Final = 0.05
"""For which each question has time for its answer, on a machine that is busy."""
LONGER: Final = 4.0
"""By so much an attempt has more time than the one before it, twice at most: a host that is slow or
far away answers none that is given up too soon. Once a member connection with the rank has worked,
every third attempt is short again, and none has more than twice what a connection took."""


@dataclass(frozen=True)
class Event:
    """News of ``rank``."""

    rank: int


@dataclass(frozen=True)
class Received(Event):
    """A message has come over the member connection with it."""

    message: Message


class Connected(Event):
    """There is a member connection with it now."""


class Broken(Event):
    """The member connection with it is no more."""


class Refused(Event):
    """Its host answers that nobody listens there: its process has ended."""


class Alive(Event):
    """It has answered a question, or has asked one."""


class RekeyAsked(Event):
    """A process that has the secret asks it, this rank, for new keys."""


@dataclass(slots=True)
class _Connection:
    """A connection. ``purpose``: "member" or "question"; "stranger": it has come, and hasn't said;
    "told": it has asked for the job's status, and has its answer."""

    peer: int  # its number in the transport
    purpose: str
    since: float
    rank: int = -1  # the other end's; -1 until its hello has come
    source: str = ""  # the address that it comes from; "": it was made here
    known: bool = False  # the other end's hello has come


@dataclass(eq=False)
class Connections:
    """One rank's. ``open``, ``start``, then the rest; ``close`` at the end. OSError: the process is
    short of descriptors."""

    rank: int
    world: int
    clock: Callable[[], float] = time.monotonic
    secret: Secret | None = None  # seals all connections; None: none is sealed

    def __post_init__(self) -> None:
        self._token = ""
        self._foreign = 0
        self.states = RankStates(self.world)
        """The world's table of its ranks; who is lost gets no answer."""
        self.trouble: dict[int, str] = {}
        """Reason why the last attempt to reach a rank failed."""
        self.answers = Answers("0" * 16, (), lambda _: ())
        """Answers to questions for the job's status."""
        self.sources: dict[int, str] = {}
        """The address that a rank has connected from, where it isn't the one that it gave."""
        self.members: dict[int, _Connection] = {}
        """The ranks with which there is a member connection."""
        self.places: list[tuple[str, int]] = []
        """Where each rank listens: numeric address and port. After ``start``."""
        self._connections: dict[int, _Connection] = {}
        self._made: dict[tuple[int, str], _Connection] = {}
        """Those that were made here, by rank and purpose."""
        self._coordinator: int | None = None
        self._tried_at = 0.0
        self._heard: set[int] = set()
        self._unanswered_attempts: Counter[int] = Counter()
        """Attempts to reach each rank since one worked."""
        self._took: dict[int, float] = {}
        """Seconds from an attempt to reach a rank until its hello came, the last time."""
        self._events: list[Event] = []
        self._listener: socket.socket | None = None
        keys = None if self.secret is None else keys_of(self.secret, PLANE)
        self._transport = Transport(keys, strangers=self.world + STRANGERS)

    @property
    def foreign(self) -> int:
        """Messages dropped: malformed, without the token, or in another language."""
        counts = self._transport.counts
        return self._foreign + counts["handshake"] + counts["foreign"]

    def open(self, address: str, ports: tuple[int, int]) -> int:
        """Listens on a port of ``ports`` (first, last; 0: any), and returns it."""
        where = self.rank, self.world, address, ports
        try:
            self._listener = listener(address, ports, CONNECTIONS * self.world + STRANGERS)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and ports[0]:
                raise no_port(*where) from error
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise no_listener(*where, error) from error
        return int(self._listener.getsockname()[1])

    def start(self, token: str, endpoints: Sequence[tuple[str, int]]) -> None:
        """Takes connections from now on. ``endpoints``: (host, port) of every rank."""
        self._token = token
        for host, port in endpoints:
            # Numeric; a str would load the codec for names.
            found = socket.getaddrinfo(host.encode(), port, type=socket.SOCK_STREAM)[0][4]
            self.places.append((str(found[0]), int(found[1])))
        self._transport.near = {host for host, _ in self.places}
        if self._listener is not None:
            self._transport.listen(self._listener)
            self._listener = None

    def wake(self) -> None:
        """Ends a wait of :meth:`poll`; may be called by any thread, until ``close``."""
        self._transport.wake()

    # ---- connections ----

    def follow(self, coordinator: int | None, now: float) -> None:
        """Connects with ``coordinator`` anew; None: this rank is the coordinator, or nobody's."""
        if self._coordinator is not None:
            before = self._made.get((self._coordinator, "member"))
            if before is not None:
                self._drop(before)
        self._coordinator = coordinator
        self.tick(now, -math.inf)

    def tick(self, now: float, patience: float) -> None:
        """Retries a broken connection with the coordinator, or one that takes too long."""
        if self._coordinator is None or now - self._tried_at < patience:
            return
        if self._reach(self._coordinator, "member", patience, now):
            self._tried_at = now

    def ask(self, ranks: Iterable[int], patience: float, now: float) -> None:
        """Asks ``ranks`` for a sign of life, each over a new connection. A question that is younger
        than ``patience`` seconds is left alone, and so is one whose answer may be under way."""
        for rank in ranks:
            self._reach(rank, "question", max(patience, QUESTION_SECONDS), now)

    def hang_up(self, rank: int) -> None:
        """Ends the member connection with ``rank``, without an event."""
        connection = self.members.get(rank)
        if connection is not None:
            self._drop(connection)

    def send(self, rank: int, body: bytes) -> bool:
        """To a rank of ``members``. False: there is no connection. A broken one loses it."""
        connection = self.members.get(rank)
        return connection is not None and self._transport.send(connection.peer, body)

    def poll(self, seconds: float) -> list[Event]:
        """Events, after a wait of at most ``seconds``."""
        for event in self._transport.poll(max(0.0, seconds)):
            self._on_event(event)
        found, self._events = self._events, []
        return found

    def close(self, linger: float) -> None:
        """Frees all; up to ``linger`` seconds for what is under way. Idempotent."""
        for connection in list(self._connections.values()):
            if not connection.known or connection.purpose == "question":
                self._drop(connection)
        self._transport.close(linger)
        if self._listener is not None:
            self._listener.close()

    def abandon(self) -> None:
        """In a forked child: closes a listener that isn't the transport's yet."""
        if self._listener is not None:
            self._listener.close()

    def _reach(self, rank: int, purpose: str, patience: float, now: float) -> bool:
        """Connects with a rank, unless there is a connection. One that takes too long is given up
        for another one. False: it is still waited for."""
        before = self._made.get((rank, purpose))
        if before is not None and before.known:
            return True
        if before is not None:
            if now - before.since < self._time_for(rank, patience):
                return False
            self.trouble[rank] = NO_ANSWER
            self._unanswered_attempts[rank] += 1
            self._drop(before)
        with contextlib.suppress(OSError):
            peer = self._transport.connect(self.places[rank])
            connection = _Connection(peer, purpose, now, rank)
            self._connections[peer] = self._made[rank, purpose] = connection
            self._say_hello(connection)
        return True

    # ---- what comes ----

    def _on_event(self, event: transport_events.Event) -> None:
        if isinstance(event, transport_events.Readable):
            return
        if isinstance(event, transport_events.Connected):
            came = _Connection(event.peer, "stranger", self.clock(), source=event.address)
            self._connections.setdefault(event.peer, came)
            return
        connection = self._connections.get(event.peer)
        if connection is None:
            return
        if isinstance(event, transport_events.Received):
            self._take(connection, event.body)
        elif isinstance(event, transport_events.Closed):
            self._over(connection, event.why)
        else:
            self._over(connection, "connection refused")
            self._events.append(Refused(connection.rank))

    def _over(self, connection: _Connection, why: str) -> None:
        if connection.rank >= 0 and not connection.known:
            self.trouble[connection.rank] = why
        was_member = self.members.get(connection.rank) is connection
        self._drop(connection)
        if was_member:
            self._events.append(Broken(connection.rank))

    def _time_for(self, rank: int, patience: float) -> float:
        """Seconds that an attempt to reach ``rank`` has."""
        tried = self._unanswered_attempts[rank]
        if rank not in self._heard:
            return float(patience * LONGER ** min(tried, 2))
        # After a cut only a new attempt gets through soon.
        most = max(patience, 2 * self._took.get(rank, 0.0))
        return float(min(patience * LONGER ** (tried % 3), most))

    def _say_hello(self, connection: _Connection) -> None:
        purpose = "question" if connection.purpose == "question" else "member"
        hello = Hello(VERSION, self._token, self.rank, purpose)
        self._transport.send(connection.peer, pack(hello))

    def _take(self, connection: _Connection, body: bytes) -> None:
        message: Message | None = None
        with contextlib.suppress(Malformed):
            message = unpack(body, self.world)
        if connection.known and message is not None and not isinstance(message, Hello):
            self._heard.add(connection.rank)
            self._events.append(Received(connection.rank, message))
        elif connection.known:
            self._foreign += 1
        elif not (isinstance(message, Hello) and self._answer(connection, message)):
            self._foreign += 1
            self._drop(connection)

    def _answer(self, connection: _Connection, hello: Hello) -> bool:
        """Takes the first message of a connection. False: whoever sent it isn't answered."""
        came, purpose = connection.rank < 0, hello.purpose
        if came and purpose == "rekey" and self.secret is not None:
            self._say_hello(connection)
            self._events.append(RekeyAsked(self.rank))
        elif came and purpose in QUESTIONS and connection.purpose == "stranger":
            # In clear anybody may ask; over a sealed connection, whoever has the secret.
            connection.purpose = "told"  # and it stays a stranger, who isn't told a second time
            for answer in self.answers.to(purpose):
                self._transport.send(connection.peer, answer)
        elif not hmac.compare_digest(
            hello.token.encode("utf-8", "surrogatepass"), self._token.encode()
        ):
            return False
        elif came and (hello.rank, purpose) == (self.rank, "probe"):
            self._say_hello(connection)  # and it stays a stranger
        elif (
            purpose in ("member", "question")
            and hello.rank != self.rank
            and connection.rank in (-1, hello.rank)
        ):
            self._greeted(connection, hello)
        else:
            return False
        return True

    def _greeted(self, connection: _Connection, hello: Hello) -> None:
        connection.known = True
        self._transport.admit(connection.peer)
        if connection.rank < 0:  # it has connected here
            connection.rank, connection.purpose = hello.rank, hello.purpose
            if connection.source != self.places[hello.rank][0]:
                self.sources[hello.rank] = connection.source
            if hello.purpose != "question":
                self._say_hello(connection)
                self._enter(connection)
            elif not self.states.is_lost(hello.rank):
                self._say_hello(connection)
                self._events.append(Alive(hello.rank))
            return
        self.trouble.pop(connection.rank, None)
        self._took[connection.rank] = self.clock() - connection.since
        self._unanswered_attempts[connection.rank] = 0
        if connection.purpose == "question":
            self._events.append(Alive(connection.rank))
            self._drop(connection)
        else:
            self._enter(connection)

    def _enter(self, connection: _Connection) -> None:
        before = self.members.get(connection.rank)
        if before is not None and before is not connection:
            self._drop(before)
        self.members[connection.rank] = connection
        self._events.append(Connected(connection.rank))

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.peer, None) is None:
            return
        self._transport.drop(connection.peer)
        if self.members.get(connection.rank) is connection:
            del self.members[connection.rank]
        made_as = connection.rank, connection.purpose
        if self._made.get(made_as) is connection:
            del self._made[made_as]
