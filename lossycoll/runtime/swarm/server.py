"""A directory that listens: one thread, and a TCP connection to each peer."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from lossycoll.errors import RendezvousError
from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.membership.framing import Framed
from lossycoll.runtime.membership.sealed_framing import framed_with

from .directory import GROUP_SIZE, PATIENCE, Directory
from .knock import key_of
from .lookout import Lookout
from .observer import Observer, ObserverCounts
from .ports import Ports, bound_to, more_descriptors
from .protocol import PLACES, Turn
from .reception import NOBODY, STRANGERS, Beside, Link, Owner, Reception
from .reunion import Reunion
from .whereabouts import Place

ACCEPT_AGAIN_SECONDS: Final = 0.05
log: Final = logging.getLogger("lossycoll")


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
        self._owner = owner or NOBODY
        if self._owner.stands_by and session:
            self._directory.adopt(session)
        self._reunion = Reunion(time.monotonic, self._directory)
        self._reception = Reception(
            self._directory,
            self._drop,
            self._watch,
            beside=Beside(self._reunion, self._owner, self._place),
        )
        self._links: dict[int, Link] = {}
        self._has_warned = False
        self._full: set[int] = set()
        """Descriptors of connections that don't take all that is to be sent."""
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
    def counts(self) -> Counter[str]:
        """What came and was no message."""
        return self._reception.counts

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
                link.frames.close()
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
        until = max(0.001, self._lookout.wakes() - time.monotonic())
        wait, most = min(self._reception.wait(), until), len(self._links) + STRANGERS
        # All that has come is heard before groups form: who has said that it is ready isn't late.
        for fd, flags in self._poller.poll(wait, most):
            if fd == self._listener.fileno():
                self._accept()
            elif fd == self._observer.fileno():
                self._observer.serve()
            elif self._lookout.asks(fd):
                if self._lookout.serve(fd, flags):
                    self._tell_to_turn()
            elif fd in self._links:
                link = self._links[fd]
                if flags & select.EPOLLOUT:
                    link.frames.flush()
                self._reception.hear(link)
        self._reception.turn()
        self._lookout.turn(self._owner.others())

    def _tell_to_turn(self) -> None:
        assert self._reunion.to is not None
        log.info("directory: its peers turn to %s:%d", *self._reunion.to)
        self._reception.tell_all(Turn(*self._reunion.to))

    def _place(self, link: Link) -> Place:
        """Where the other end of a connection finds this directory."""
        assert isinstance(link.frames, Framed)
        return self._lookout.place(link.frames.end)

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BlockingIOError:
            return
        except OSError as error:  # short of descriptors, or gone already
            if error.errno != errno.EMFILE or not more_descriptors():
                self._is_short(error)
                time.sleep(ACCEPT_AGAIN_SECONDS)
            return
        frames = framed_with(self._secret, end, connects=False)
        self._poller.register(frames.fd, select.EPOLLIN)
        self._links[frames.fd] = self._reception.admit(frames)

    def _is_short(self, error: OSError) -> None:
        if error.errno in (errno.EMFILE, errno.ENFILE) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "directory: no descriptor is left for another peer, of which each takes one (%s): "
                "raise the limit of the process that listens (ulimit -n)",
                error.strerror,
            )

    def _watch(self, link: Link) -> None:
        """For when a connection takes more of what is to be sent."""
        fd, full = link.frames.fd, link.frames.has_unsent
        if full != (fd in self._full) and fd in self._links:
            (self._full.add if full else self._full.discard)(fd)
            self._poller.modify(fd, select.EPOLLIN | (select.EPOLLOUT if full else 0))

    def _drop(self, link: Link) -> None:
        if self._links.pop(link.frames.fd, None) is not None:
            self._full.discard(link.frames.fd)
            with contextlib.suppress(OSError):
                self._poller.unregister(link.frames.fd)
        link.frames.close()
