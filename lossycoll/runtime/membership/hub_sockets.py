"""The control plane's sockets: every rank is connected with the hub, and can be asked by any other.

Each rank listens. A *member* connection goes from a rank to the hub and carries messages both ways.
A *question* is a connection of its own to any rank: the answer is the other's hello, or that nobody
listens there any more. After a cut TCP tries an old connection ever less often, so that a silent
rank is asked over a new one.

Both ends begin with a :class:`Hello`; before it has come nothing else is believed. Used by one
thread, but for ``open`` and ``wake``.

Long because all connections are in one table and one epoll set, whatever they are for.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from lossycoll.errors import no_port
from lossycoll.runtime.keys.secret import Secret

from .framing import Framed
from .messages import Hello, Malformed, Message, pack, unpack
from .reachability import NO_ANSWER
from .sealed_framing import framed_with

VERSION: Final = 2
HELLO_SECONDS: Final = 5.0
"""How long a connection may take to say whose it is."""
STRANGERS: Final = 64
"""Connections, beyond one of each rank, that haven't said whose they are."""
ACCEPTS: Final = 64
SEGMENT_BYTES: Final = 1220
"""Of TCP, as large as any path of IPv6 carries. Where a path carries less than the interfaces, and
its routers say nothing of that, larger ones would vanish for ever."""
CONNECTIONS: Final = 3
"""As many of each rank may wait to be taken: its member connection, and where sites are learnt half
of the three by which each round trip is measured."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message over the member connection with ``rank``."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class Connected:
    """There is a member connection with ``rank`` now."""

    rank: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The member connection with ``rank`` is no more."""

    rank: int


@dataclass(frozen=True, slots=True)
class Refused:
    """``rank``'s host answers that nobody listens there: its process has ended."""

    rank: int


@dataclass(frozen=True, slots=True)
class Alive:
    """``rank`` has answered a question, or has asked one."""

    rank: int


@dataclass(frozen=True, slots=True)
class NewKeysAsked:
    """A process that has the secret asks for new keys."""


Event: TypeAlias = Received | Connected | Broken | Refused | Alive | NewKeysAsked


@dataclass(slots=True)
class _Link:
    """A connection. ``rank``: whose, -1 until its hello has come. ``since``: when it was begun."""

    framed: Framed
    purpose: str
    since: float
    rank: int = -1
    is_near: bool = False
    """It comes from an address where a rank is."""
    source: str = ""
    """The address that it comes from."""
    known: bool = False
    connecting: bool = False
    watched: int = select.EPOLLIN
    """What epoll watches of it."""


class HubSockets:
    """One rank's end. ``open``, ``start``, then the rest; ``close`` at the end.

    ``members`` has the ranks with which there is a member connection. ``foreign`` counts what was
    dropped since it was malformed or without the token. Ranks in ``shunned`` get no answer to their
    questions.

    Args:
        rank: This process's number in the cohort.
        world: The cohort's processes.
        clock: In seconds.
        secret: All connections are sealed with it; None: none is.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        clock: Callable[[], float] = time.monotonic,
        secret: Secret | None = None,
    ) -> None:
        self._secret = secret
        self._rank = rank
        self._world = world
        self._clock = clock
        self._token = ""
        self.foreign = 0
        self.shunned: set[int] = set()
        self.trouble: dict[int, str] = {}
        """What became of the last attempt to reach a rank, where that failed."""
        self.sources: dict[int, str] = {}
        """The address that a rank has connected from, where it isn't the one that it gave."""
        self.members: dict[int, _Link] = {}
        self._places: list[tuple[int, tuple[object, ...]]] = []
        self._hosts: set[object] = set()
        self._links: dict[int, _Link] = {}
        self._questions: dict[int, _Link] = {}
        self._hub: int | None = None
        self._to_hub: _Link | None = None
        self._tried_at = 0.0
        self._events: list[Event] = []
        self._listener: socket.socket | None = None
        self._listening = False
        self._poller = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, select.EPOLLIN)
        self._closed = False

    def open(self, address: str, ports: tuple[int, int]) -> int:
        """Listens on ``address`` and a port of ``ports`` (first, last); 0: any.

        Returns the port. Raises RendezvousError when none can be had.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        first, last = ports
        for port in range(first, last + 1):
            end = socket.socket(family, socket.SOCK_STREAM)
            try:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                # Both ends keep to it, whatever their interfaces carry.
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
                end.bind((address, port))
                end.listen(CONNECTIONS * self._world + STRANGERS)
            except OSError:
                end.close()
                continue
            end.setblocking(False)
            self._listener = end
            return int(end.getsockname()[1])
        raise no_port(self._rank, self._world, address, ports)

    def start(self, token: str, endpoints: Sequence[tuple[str, int]]) -> None:
        """Takes connections from now on. ``endpoints``: (host, port) of every rank."""
        self._token = token
        for host, port in endpoints:
            # Numeric; a str would load the codec for names.
            found = socket.getaddrinfo(host.encode(), port, type=socket.SOCK_STREAM)[0]
            self._places.append((found[0], found[4]))
            self._hosts.add(found[4][0])
        self._listen()

    def place_of(self, rank: int) -> tuple[str, int]:
        """Where a rank listens: numeric address and port. After ``start``."""
        host, port, *_ = self._places[rank][1]
        return str(host), int(str(port))

    def wake(self) -> None:
        """Ends a wait of :meth:`poll`; may be called by any thread, until ``close``."""
        os.eventfd_write(self._wake, 1)

    # ---- connections ----

    def follow(self, hub: int | None, now: float) -> None:
        """Connects with ``hub`` anew; None: this rank is the hub, or nobody's."""
        if self._to_hub is not None:
            self._drop(self._to_hub)
        self._hub = hub
        self._connect_hub(now)

    def tick(self, now: float, patience: float) -> None:
        """Tries a broken connection with the hub again, one that is under way ``patience`` s after
        its begin; closes strangers; takes connections again where descriptors were short."""
        if self._hub is not None and now - self._tried_at >= patience:
            under_way = self._to_hub
            if under_way is not None and not under_way.known:
                self._unanswered(under_way)
            self._connect_hub(now)
        for link in list(self._links.values()):
            if not link.known and link.purpose == "stranger" and now - link.since > HELLO_SECONDS:
                self._drop(link)
        self._listen()

    def ask(self, ranks: Iterable[int], patience: float, now: float) -> None:
        """Asks ``ranks`` for a sign of life, each over a new connection.

        A question that is younger than ``patience`` seconds is left alone.
        """
        for rank in ranks:
            before = self._questions.get(rank)
            if before is not None:
                if now - before.since < patience:
                    continue
                self._unanswered(before)
            link = self._connect(rank, "question", now)
            if link is not None:
                self._questions[rank] = link

    def hang_up(self, rank: int) -> None:
        """Ends the member connection with ``rank``, without an event."""
        link = self.members.get(rank)
        if link is not None:
            self._drop(link)

    def send(self, rank: int, body: bytes) -> bool:
        """To a rank of ``members``. False: there is no connection. A broken one loses it."""
        link = self.members.get(rank)
        if link is None:
            return False
        link.framed.write(body)
        self._check(link)
        return True

    def poll(self, seconds: float) -> list[Event]:
        """What has happened, after a wait of at most ``seconds``."""
        if not self._events:
            for fd, flags in self._poller.poll(max(0.0, seconds)):
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                elif self._listener is not None and fd == self._listener.fileno():
                    self._accept()
                elif fd in self._links:
                    self._serve(self._links[fd], flags)
        found, self._events = self._events, []
        return found

    def close(self, linger: float) -> None:
        """Frees all; up to ``linger`` seconds for what is under way. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._hub = None
        for link in list(self._links.values()):
            if not link.known or link.purpose == "question":
                self._drop(link)
        self._drain(linger)
        for link in list(self._links.values()):
            self._drop(link)
        self._free()

    def abandon(self) -> None:
        """Closes the descriptors in a forked child, where they would keep the parent's connections
        alive; leaves the epoll set alone, which both share.

        Not after ``close``: the numbers may be others' descriptors by then.
        """
        if self._closed:
            return
        self._closed = True
        for link in self._links.values():
            link.framed.close()
        self._free()

    def _free(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._poller.close()
        os.close(self._wake)

    def _drain(self, linger: float) -> None:
        """Says the end and waits for the others': a close with anything unread would reset the
        connection, and what has been sent would be lost with it."""
        end = time.monotonic() + linger
        self._poller.unregister(self._wake)
        if self._listening and self._listener is not None:
            self._poller.unregister(self._listener.fileno())
        finished: set[int] = set()
        while self._links and (left := end - time.monotonic()) > 0:
            for link in list(self._links.values()):
                if link.framed.fd not in finished and not link.framed.has_unsent:
                    finished.add(link.framed.fd)
                    link.framed.finish()
                    self._check(link)
            for fd, _ in self._poller.poll(left):
                open_still = self._links.get(fd)
                if open_still is not None:
                    open_still.framed.flush()
                    open_still.framed.read()
                    self._check(open_still)

    def _connect_hub(self, now: float) -> None:
        self._tried_at = now
        if self._hub is not None and self._to_hub is None:
            self._to_hub = self._connect(self._hub, "member", now)

    def _connect(self, rank: int, purpose: str, now: float) -> _Link | None:
        """Begins a connection; None: it couldn't be begun, or nobody listens there."""
        family, place = self._places[rank]
        try:
            end = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # short of descriptors
            return None
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = end.connect_ex(place)
        if code not in (0, errno.EINPROGRESS):
            end.close()
            self._failed(rank, code)
            return None
        framed = framed_with(self._secret, end, connects=True)
        link = _Link(framed, purpose, now, rank=rank, connecting=True, watched=select.EPOLLOUT)
        self._links[link.framed.fd] = link
        self._poller.register(link.framed.fd, select.EPOLLOUT)
        return link

    def _listen(self) -> None:
        if self._listener is not None and not self._listening:
            self._listening = True
            self._poller.register(self._listener.fileno(), select.EPOLLIN)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(ACCEPTS):
            try:
                end, place = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                # Short of descriptors: whoever waits is taken at the next tick.
                self._listening = False
                self._poller.unregister(self._listener.fileno())
                return
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            framed = framed_with(self._secret, end, connects=False)
            link = _Link(
                framed,
                "stranger",
                self._clock(),
                is_near=place[0] in self._hosts,
                source=str(place[0]),
            )
            self._links[link.framed.fd] = link
            self._poller.register(link.framed.fd, select.EPOLLIN)
            strangers = [one for one in self._links.values() if one.purpose == "stranger"]
            if len(strangers) > self._world + STRANGERS:
                self._drop(min(strangers, key=lambda one: (one.is_near, one.since)))

    # ---- what comes ----

    def _serve(self, link: _Link, flags: int) -> None:
        if link.connecting:
            self._established(link)
            return
        if flags & select.EPOLLOUT:
            link.framed.flush()
        if flags & ~select.EPOLLOUT:
            for body in link.framed.read():
                self._take(link, body)
                if link.framed.fd not in self._links:
                    return
        self._check(link)

    def _established(self, link: _Link) -> None:
        code = link.framed.end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            rank = link.rank
            self._drop(link)
            self._failed(rank, code)
            return
        link.connecting = False
        self._say_hello(link)
        self._check(link)

    def _failed(self, rank: int, code: int) -> None:
        """A connection with ``rank`` couldn't be made."""
        self.trouble[rank] = os.strerror(code).lower()
        if code == errno.ECONNREFUSED:
            self._events.append(Refused(rank))

    def _unanswered(self, link: _Link) -> None:
        """Gives up an attempt that has taken too long."""
        self.trouble[link.rank] = NO_ANSWER
        self._drop(link)

    def _say_hello(self, link: _Link) -> None:
        purpose = "question" if link.purpose == "question" else "member"
        link.framed.write(pack(Hello(VERSION, self._token, self._rank, purpose)))

    def _take(self, link: _Link, body: bytes) -> None:
        try:
            message = unpack(body, self._world)
        except Malformed:
            self.foreign += 1
            if not link.known:
                self._drop(link)
            return
        if link.known:
            if isinstance(message, Hello):
                self.foreign += 1
            else:
                self._events.append(Received(link.rank, message))
        elif isinstance(message, Hello) and self._is_visit(link, message):
            self._say_hello(link)  # and it stays a stranger
        elif isinstance(message, Hello) and self._asks_for_keys(link, message):
            self._say_hello(link)
            self._events.append(NewKeysAsked())
        elif self._is_ours(link, message):
            assert isinstance(message, Hello)
            self._greeted(link, message)
        else:
            self.foreign += 1
            self._drop(link)

    def _is_visit(self, link: _Link, hello: Hello) -> bool:
        return (
            link.rank < 0
            and (hello.version, hello.rank, hello.purpose) == (VERSION, self._rank, "visit")
            and self._knows_token(hello)
        )

    def _asks_for_keys(self, link: _Link, hello: Hello) -> bool:
        is_asked = (hello.version, hello.purpose) == (VERSION, "newkeys")
        return is_asked and link.rank < 0 and self._secret is not None

    def _is_ours(self, link: _Link, message: Message) -> bool:
        return (
            isinstance(message, Hello)
            and message.version == VERSION
            and message.purpose in ("member", "question")
            and message.rank != self._rank
            and link.rank in (-1, message.rank)
            and self._knows_token(message)
        )

    def _knows_token(self, hello: Hello) -> bool:
        token = hello.token.encode("utf-8", "surrogatepass")
        return hmac.compare_digest(token, self._token.encode())

    def _greeted(self, link: _Link, hello: Hello) -> None:
        link.known = True
        if link.rank < 0:  # it has connected here
            link.rank, link.purpose = hello.rank, hello.purpose
            if link.source != self._places[hello.rank][1][0]:
                self.sources[hello.rank] = link.source
            if hello.purpose != "question":
                self._say_hello(link)
                self._enter(link)
            elif hello.rank not in self.shunned:
                self._say_hello(link)
                self._events.append(Alive(hello.rank))
            return
        self.trouble.pop(link.rank, None)
        if link.purpose == "question":
            self._events.append(Alive(link.rank))
            self._drop(link)
        else:
            self._enter(link)

    def _enter(self, link: _Link) -> None:
        before = self.members.get(link.rank)
        if before is not None and before is not link:
            self._drop(before)
        self.members[link.rank] = link
        self._events.append(Connected(link.rank))

    def _check(self, link: _Link) -> None:
        """Frees a connection that is broken; else has epoll watch what is wanted now."""
        fd = link.framed.fd
        if fd not in self._links:
            return
        if link.framed.broken and not link.known and link.rank >= 0:
            self.trouble[link.rank] = "closed by whoever listens there"
        if not link.framed.broken:
            wanted = select.EPOLLIN | (select.EPOLLOUT if link.framed.has_unsent else 0)
            if wanted != link.watched:
                link.watched = wanted
                self._poller.modify(fd, wanted)
            return
        self.foreign += link.framed.malformed
        was_member = self.members.get(link.rank) is link
        self._drop(link)
        if was_member:
            self._events.append(Broken(link.rank))

    def _drop(self, link: _Link) -> None:
        if self._links.pop(link.framed.fd, None) is None:
            return
        self._poller.unregister(link.framed.fd)
        link.framed.close()
        if self.members.get(link.rank) is link:
            del self.members[link.rank]
        if self._questions.get(link.rank) is link:
            del self._questions[link.rank]
        if self._to_hub is link:
            self._to_hub = None
