"""A directory that listens: one thread, and a TCP connection to each peer."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from lossycoll.errors import RendezvousError
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.membership.framing import Framed
from lossycoll.runtime.membership.messages import Malformed
from lossycoll.runtime.membership.sealed_framing import framed_with

from .directory import GROUP_SIZE, PATIENCE, Directory
from .knock import key_of
from .lookout import Lookout
from .observer import Observer, ObserverCounts
from .ports import Ports, bound_to
from .protocol import (
    MOST_DIRECTORIES,
    PLACES,
    Averages,
    Beat,
    Directories,
    Found,
    Gone,
    Here,
    Join,
    Joined,
    Leave,
    Message,
    Offers,
    Peers,
    Ready,
    Refused,
    Rival,
    Seek,
    Serves,
    Spare,
    Turn,
    Unmet,
    Who,
    pack,
    unpack,
)
from .reunion import Reunion
from .whereabouts import Place

JOIN_SECONDS: Final = 5.0
"""A stranger that hasn't joined by then is dropped."""
STRANGERS: Final = 64
ACCEPT_AGAIN_SECONDS: Final = 0.05
log: Final = logging.getLogger("lossycoll")


@dataclass(slots=True)
class _Link:
    framed: Framed
    since: float
    number: int = -1
    """Whose it is; -1: a stranger's."""
    watches_out: bool = False


@dataclass(frozen=True, slots=True)
class Owner:
    """The peer whose directory one is.

    Attributes:
        name: The peer's.
        elsewhere: Whom it turns to in turn.
        others: Where it has heard of directories, now or earlier.
        stands_by: The directory takes nobody in before this peer has come: others hear whom to ask
            instead.
    """

    name: str
    elsewhere: Callable[[], Sequence[Place]]
    others: Callable[[], Sequence[Place]]
    stands_by: bool


class DirectoryServer:
    """Serves from when it is made until ``close``.

    Args:
        host: The numeric address that it listens on.
        port: 0: any.
        secret: What peers must have; None: all is in clear.
        shape: As for :class:`Directory`.
        most: As for :class:`Directory`.
        patience: As for :class:`Directory`.
        session: As for :class:`Directory`. One that stands by takes over its peers.
        owner: None: it is nobody's.
        bound: Sockets that have the address already, which are the server's from then on; None: it
            makes them.

    Raises:
        RendezvousError: The port is taken, or the address isn't this machine's.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: Secret | None = None,
        *,
        shape: Sequence[int] = (),
        most: int = GROUP_SIZE,
        patience: float = PATIENCE,
        session: str = "",
        owner: Owner | None = None,
        bound: Ports | None = None,
    ) -> None:
        self._secret = secret
        self._directory = Directory(
            time.monotonic, shape=shape, most=most, patience=patience, session=session
        )
        self._knock_key = "", b""
        """Of which session it is."""
        ports = bound or bound_to(host, port)
        try:
            # For whoever listens here next, while connections of this one are on their way out.
            ports.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            ports.tcp.listen(PLACES)
        except OSError as error:
            ports.close()
            raise RendezvousError(f"no directory at {host}:{port}: {error.strerror}") from error
        self._listener, self._observer = ports.tcp, Observer(ports.udp, self._key)
        self.port: int = ports.port
        self._owner = owner or Owner("", tuple, tuple, stands_by=False)
        self._stands_by = self._owner.stands_by
        if self._stands_by and session:
            self._directory.adopt(session)
        self._reunion = Reunion(time.monotonic, self._directory)
        self._links: dict[int, _Link] = {}
        self._of_peer: dict[int, _Link] = {}
        self._poller = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._listener.fileno(), select.EPOLLIN)
        self._poller.register(self._observer.fileno(), select.EPOLLIN)
        self._poller.register(self._wake, select.EPOLLIN)
        self._lookout = Lookout(self._reunion, secret, self._poller, host, self.port)
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="lossycoll-directory", daemon=True)
        self._thread.start()

    def adopt(self, session: str) -> None:
        """Peers of this swarm may come, when their directory has ended. While nobody is here."""
        self._directory.adopt(session)

    @property
    def observed(self) -> ObserverCounts:
        """What has come to the UDP port."""
        return self._observer.counts

    def close(self) -> None:
        """Ends the thread and all connections. Idempotent."""
        if self._stop:
            return
        self._stop = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._stop:
                self._turn()
        finally:
            self._lookout.close()
            for link in list(self._links.values()):
                link.framed.close()
            self._listener.close()
            self._observer.close()
            self._poller.close()

    def _key(self) -> bytes:
        """Of knocks; the session is another's once this directory has adopted it."""
        session = self._directory.session
        if self._knock_key[0] != session:
            self._knock_key = session, key_of(self._secret, session)
        return self._knock_key[1]

    def _turn(self) -> None:
        wakes = min(self._directory.wakes() or math.inf, self._lookout.wakes())
        wait = min(1.0, max(0.001, wakes - time.monotonic()))
        for fd, flags in self._poller.poll(wait):
            if fd == self._listener.fileno():
                self._accept()
            elif fd == self._observer.fileno():
                self._observer.serve()
            elif self._lookout.asks(fd):
                if self._lookout.serve(fd, flags):
                    self._tell_to_turn()
            elif fd in self._links:
                link = self._links[fd]
                try:
                    self._serve(link, flags)
                except Exception:  # of one peer, whose fault it is: all others go on
                    log.exception("directory: a connection is dropped")
                    self._end(link)
        now = time.monotonic()
        for link in [one for one in self._links.values() if one.number < 0]:
            if now - link.since > JOIN_SECONDS:
                self._drop(link)
        for number in self._directory.overdue():
            self._remember(number)
            self._lose(number)
        if self._reunion.ends():
            self._directory.adopt(self._directory.session)
            self._stands_by = bool(self._owner.name)
        self._lookout.turn(self._owner.others())
        for group in self._directory.form():
            for member in group.members:
                self._tell(member.number, group)
        for number, loans in self._directory.lends():
            for loan in loans:
                for member in loan.members:
                    self._tell(member.number, loan)
            self._tell(number, Found(len(loans)))

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BlockingIOError:
            return
        except OSError:  # short of descriptors, or gone already
            time.sleep(ACCEPT_AGAIN_SECONDS)
            return
        link = _Link(framed_with(self._secret, end, connects=False), time.monotonic())
        self._links[link.framed.fd] = link
        self._poller.register(link.framed.fd, select.EPOLLIN)
        strangers = [one for one in self._links.values() if one.number < 0]
        if len(strangers) > STRANGERS:
            self._drop(min(strangers, key=lambda one: one.since))

    def _serve(self, link: _Link, flags: int) -> None:
        if flags & select.EPOLLOUT:
            link.framed.flush()
        if flags & ~select.EPOLLOUT:
            for body in link.framed.read():
                try:
                    self._take(link, unpack(body))
                except Malformed:
                    self._end(link)
                if link.framed.fd not in self._links:
                    return
        self._check(link)

    def _take(self, link: _Link, message: Message) -> None:
        if link.number < 0:
            if isinstance(message, Join):
                self._join(link, message)
            elif isinstance(message, Rival):
                own = self._lookout.place(link.framed.end)
                link.framed.write(pack(self._reunion.asked(message, own)))
            else:
                self._drop(link)
            return
        self._directory.beat(link.number)
        if isinstance(message, Here):
            self._directory.here(link.number, message)
        elif isinstance(message, Serves):
            self._directory.serves(link.number, (message.host, message.port))
            self._tell_directories()
        elif isinstance(message, Spare):
            before = self._directory.directories()
            self._directory.spare(link.number, (message.host, message.port))
            if self._directory.directories() != before:
                self._tell_directories()
        elif isinstance(message, Turn):
            self._lose(link.number, turns=True)
        elif isinstance(message, Averages):
            self._tell(link.number, self._directory.averages(link.number, message))
        elif isinstance(message, Who):
            self._tell(link.number, Peers(self._directory.names()))
        elif isinstance(message, Ready):
            self._directory.ready(link.number, message.weight)
        elif isinstance(message, Unmet):
            self._directory.unmet(link.number, message.comings)
        elif isinstance(message, Offers):
            self._directory.offers(link.number, bool(message.has))
        elif isinstance(message, Seek):
            self._directory.seeks(link.number, message.lenders)
        elif isinstance(message, Beat):
            self._tell(link.number, Beat(len(self._directory.peers)))
        elif isinstance(message, Leave):
            self._lose(link.number)

    def _join(self, link: _Link, wanted: Join) -> None:
        places = self._instead(wanted)
        if places is not None:
            link.framed.write(pack(Directories(tuple(places[:MOST_DIRECTORIES]))))
            link.framed.finish()
            self._drop(link)
            return
        self._stands_by = False
        if self._directory.is_again(wanted):  # its former connection has ended unseen
            self._lose(wanted.number)
        answer = self._directory.join(wanted)
        if isinstance(answer, Joined):
            link.number = answer.number
            self._of_peer[answer.number] = link
        link.framed.write(pack(answer))
        if isinstance(answer, Joined):
            self._tell(answer.number, Directories(self._directory.directories()))
        if isinstance(answer, Refused):
            link.framed.finish()
            self._drop(link)

    def _instead(self, wanted: Join) -> list[Place] | None:
        """Whom a peer that comes should ask; None: it is right here."""
        is_owner, is_new = wanted.name == self._owner.name, wanted.number == PLACES
        place = self._reunion.elsewhere(wanted) if is_new or not is_owner else None
        found = [] if place is None else [place]
        # Its owner itself may be new: then the swarm is elsewhere, if it is anywhere.
        if self._stands_by and (is_new or not is_owner):
            return found + [one for one in self._owner.elsewhere() if one not in found]
        return found or None

    def _tell_to_turn(self) -> None:
        assert self._reunion.to is not None
        log.info("directory: its peers turn to %s:%d", *self._reunion.to)
        for number in list(self._of_peer):
            self._tell(number, Turn(*self._reunion.to))

    def _tell_directories(self) -> None:
        for number in list(self._of_peer):
            self._tell(number, Directories(self._directory.directories()))

    def _tell(self, number: int, message: Message) -> None:
        link = self._of_peer.get(number)
        if link is not None:
            link.framed.write(pack(message))
            self._check(link)

    def _check(self, link: _Link) -> None:
        if link.framed.broken:
            self._end(link)
        elif link.framed.has_unsent != link.watches_out:
            link.watches_out = link.framed.has_unsent
            flags = select.EPOLLIN | (select.EPOLLOUT if link.watches_out else 0)
            self._poller.modify(link.framed.fd, flags)

    def _end(self, link: _Link) -> None:
        """The connection is over, and so is the peer, until it comes again."""
        if link.number >= 0:
            self._remember(link.number)
            self._lose(link.number)
        else:
            self._drop(link)

    def _remember(self, number: int) -> None:
        """A peer that is lost may live in another part of the swarm, and serve there."""
        peer, listed = self._directory.peers.get(number), self._directory.directories()
        for place in (peer.spare, peer.serves) if peer is not None else ():
            if place in listed:
                self._reunion.learn(place)

    def _lose(self, number: int, *, turns: bool = False) -> None:
        """``turns``: to another directory; whoever may still need its packets has them."""
        link = self._of_peer.pop(number, None)
        if link is not None:
            link.number = -1
            self._drop(link)
        before = self._directory.directories()
        for other, coming in self._directory.lost(number):
            if not turns:
                self._tell(other, Gone(coming))
        if self._directory.directories() != before:
            self._tell_directories()

    def _drop(self, link: _Link) -> None:
        if self._links.pop(link.framed.fd, None) is not None:
            with contextlib.suppress(OSError):
                self._poller.unregister(link.framed.fd)
            link.framed.close()
