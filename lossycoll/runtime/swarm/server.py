"""A directory that listens: one thread, and a transport that has all its connections."""

from __future__ import annotations

import logging
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from lossycoll.errors import RendezvousError
from lossycoll.runtime.control.events import Connected, Event, Peer, Readable
from lossycoll.runtime.control.transport import Transport
from lossycoll.runtime.keys.secret import Secret

from .directory import GROUP_SIZE, PATIENCE, Directory
from .knock import key_of
from .lookout import Lookout
from .observer import Observer, ObserverCounts
from .ports import Ports, bound_to, more_descriptors
from .protocol import PLACES, Turn
from .reception import NOBODY, STRANGERS, Beside, Link, Owner, Reception
from .reunion import Reunion
from .ways import HANDSHAKE_SECONDS, TransportSession, swarm_keys
from .whereabouts import Place

SPARE_DESCRIPTORS: Final = 8
"""Fewer than these are left: the process is short of them."""
AT_ONCE: Final = 2 * PLACES
"""Events that are taken before groups are formed: whoever has said that it is ready isn't late."""
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
            self._transport = Transport(
                swarm_keys(secret), strangers=_most_strangers(), handshake=HANDSHAKE_SECONDS
            )
        except OSError as error:
            ports.close()
            raise RendezvousError(f"no directory at {host}:{port}: {error.strerror}") from error
        self.port: int = ports.port
        self._transport.listen(ports.tcp)
        self._observer = Observer(ports.udp, self._key)
        self._transport.watch(self._observer.fileno())
        self._owner = owner or NOBODY
        if self._owner.stands_by and session:
            self._directory.adopt(session)
        self._reunion = Reunion(time.monotonic, self._directory)
        self._reception = Reception(
            self._directory,
            self._drop,
            beside=Beside(self._reunion, self._owner, self._place),
        )
        self._links: dict[Peer, Link] = {}
        self._has_warned = False
        self._lookout = Lookout(self._reunion, self._transport, host, self.port)
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
        if not self._transport.closed:
            self._transport.wake()
        self._thread.join()
        self._transport.close()

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._stop:
                self._turn()
        finally:
            self._transport.unwatch(self._observer.fileno())
            self._observer.close()
            if not self._stop:  # by an error, which peers are to hear of
                self._transport.close()

    def _key(self) -> bytes:
        """Of knocks; the session is another's once this directory has adopted it."""
        session = self._directory.session
        if self._knock_key[0] != session:
            self._knock_key = session, key_of(self._secret, session)
        return self._knock_key[1]

    def _turn(self) -> None:
        until = max(0.001, self._lookout.wakes() - time.monotonic())
        taken, events = 0, self._transport.poll(min(self._reception.wait(), until))
        # All that has come is heard before groups form: who has said that it is ready isn't late.
        while events:
            taken += len(events)
            for event in events:
                self._take(event)
            events = self._transport.poll(0.0) if taken < AT_ONCE else []
        self._see_to_descriptors()
        self._reception.turn()
        self._lookout.turn(self._owner.others())

    def _take(self, event: Event) -> None:
        if isinstance(event, Readable):
            self._observer.serve()
        elif self._lookout.asks(event.peer):
            if self._lookout.serve(event):
                self._tell_to_turn()
        elif isinstance(event, Connected):
            session = TransportSession(self._transport, event.peer, event.own)
            self._links[event.peer] = self._reception.admit(session)
        elif event.peer in self._links:
            link = self._links[event.peer]
            self._session(link).take(event)
            self._reception.hear(link)
            if link.number >= 0:
                self._transport.admit(event.peer)

    def _tell_to_turn(self) -> None:
        assert self._reunion.to is not None
        log.info("directory: its peers turn to %s:%d", *self._reunion.to)
        self._reception.tell_all(Turn(*self._reunion.to))

    def _place(self, link: Link) -> Place:
        """Where the other end of a connection finds this directory."""
        return self._lookout.place(self._session(link).own)

    def _session(self, link: Link) -> TransportSession:
        assert isinstance(link.session, TransportSession)
        return link.session

    def _see_to_descriptors(self) -> None:
        """Before none is left: libzmq says nothing of connections that it can't take."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if self._transport.highest < soft - SPARE_DESCRIPTORS or self._has_warned:
            return
        if not more_descriptors():
            self._has_warned = True
            log.warning(
                "directory: no descriptor is left for another peer, of which each takes one (%d of "
                "%d): raise the limit of the process that listens (ulimit -n)",
                self._transport.highest + 1,
                soft,
            )

    def _drop(self, link: Link) -> None:
        self._links.pop(self._session(link).peer, None)
        link.session.close()


def _most_strangers() -> int:
    """Their descriptors leave those of peers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return STRANGERS if hard == resource.RLIM_INFINITY else min(STRANGERS, hard // 4)
