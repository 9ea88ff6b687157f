"""A directory that listens: one thread, and a TCP connection to each peer."""

from __future__ import annotations

import contextlib
import logging
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
from .observer import Observer, ObserverCounts
from .protocol import (
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
    Seek,
    Serves,
    Unmet,
    Who,
    pack,
    unpack,
)

JOIN_SECONDS: Final = 5.0
"""A stranger that hasn't joined by then is dropped."""
STRANGERS: Final = 64
ACCEPT_AGAIN_SECONDS: Final = 0.05
TRIES: Final = 16
"""To find a port that is free in TCP and UDP, where any will do."""
log: Final = logging.getLogger("lossycoll")


@dataclass(slots=True)
class _Link:
    framed: Framed
    since: float
    number: int = -1
    """Whose it is; -1: a stranger's."""
    watches_out: bool = False


class DirectoryServer:
    """Serves from when it is made until ``close``.

    Args:
        host: The numeric address that it listens on.
        port: 0: any.
        secret: What peers must have; None: all is in clear.
        shape: As for :class:`Directory`.
        most: As for :class:`Directory`.
        patience: As for :class:`Directory`.
        session: As for :class:`Directory`.

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
    ) -> None:
        self._secret = secret
        self._directory = Directory(
            time.monotonic, shape=shape, most=most, patience=patience, session=session
        )
        self._knock_key = "", b""
        """Of which session it is."""
        self._listener, self._observer = _opened(host, port, self._key)
        self.port: int = self._listener.getsockname()[1]
        self._owner = ""
        """Who must come first; "": anybody may come."""
        self._elsewhere: Callable[[], Sequence[tuple[str, int]]] = tuple
        self._links: dict[int, _Link] = {}
        self._of_peer: dict[int, _Link] = {}
        self._poller = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._listener.fileno(), select.EPOLLIN)
        self._poller.register(self._observer.fileno(), select.EPOLLIN)
        self._poller.register(self._wake, select.EPOLLIN)
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="lossycoll-directory", daemon=True)
        self._thread.start()

    def stand_by(self, owner: str, elsewhere: Callable[[], Sequence[tuple[str, int]]]) -> None:
        """Takes nobody in before the peer named ``owner`` has come, whose directory this is: others
        hear whom to ask instead. Before anybody can know this directory."""
        self._owner, self._elsewhere = owner, elsewhere

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
        wakes = self._directory.wakes()
        wait = 1.0 if wakes is None else min(1.0, max(0.001, wakes - time.monotonic()))
        for fd, flags in self._poller.poll(wait):
            if fd == self._listener.fileno():
                self._accept()
            elif fd == self._observer.fileno():
                self._observer.serve()
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
            self._lose(number)
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
            else:
                self._drop(link)
            return
        self._directory.beat(link.number)
        if isinstance(message, Here):
            self._directory.here(link.number, message)
        elif isinstance(message, Serves):
            self._directory.serves(link.number, (message.host, message.port))
            self._tell_directories()
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
            self._end(link)

    def _join(self, link: _Link, wanted: Join) -> None:
        if self._owner not in ("", wanted.name):
            link.framed.write(pack(Directories(tuple(self._elsewhere()))))
            link.framed.finish()
            self._drop(link)
            return
        self._owner = ""
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
            self._lose(link.number)
        else:
            self._drop(link)

    def _lose(self, number: int) -> None:
        link = self._of_peer.pop(number, None)
        if link is not None:
            link.number = -1
            self._drop(link)
        before = self._directory.directories()
        for other, coming in self._directory.lost(number):
            self._tell(other, Gone(coming))
        if self._directory.directories() != before:
            self._tell_directories()

    def _drop(self, link: _Link) -> None:
        if self._links.pop(link.framed.fd, None) is not None:
            with contextlib.suppress(OSError):
                self._poller.unregister(link.framed.fd)
            link.framed.close()


def _opened(host: str, port: int, key: Callable[[], bytes]) -> tuple[socket.socket, Observer]:
    """A listener, and an observer on the same port."""
    for turn in range(TRIES):
        listener = _listening(host, port)
        try:
            return listener, Observer(host, listener.getsockname()[1], key)
        except RendezvousError:
            listener.close()
            if port or turn == TRIES - 1:
                raise
    raise AssertionError


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(PLACES)
    except OSError as error:
        listener.close()
        raise RendezvousError(f"no directory at {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener
