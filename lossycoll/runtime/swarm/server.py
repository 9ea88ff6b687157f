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
from lossycoll.runtime.control.schema import Address
from lossycoll.runtime.control.transport import Transport
from lossycoll.runtime.keys.secret import Secret

from .connectivity import key_of
from .directory import GROUP_SIZE, PATIENCE, Directory
from .directory_transport import FINISH_SECONDS, HANDSHAKE_SECONDS, TransportConnection, swarm_keys
from .partition_merge import DirectoryProbe, PartitionMerge
from .ports import Ports, bound_to, more_descriptors
from .protocol import MOST_PEERS, Redirect
from .reflexive_address import ReflexiveAddressCounts, ReflexiveAddressServer
from .service import NOBODY, STRANGERS, DirectoryService, MergeContext, Owner, PeerSession

SPARE_DESCRIPTORS: Final = 8
"""Fewer than these are left: the process is short of them."""
AT_ONCE: Final = 2 * MOST_PEERS
"""Events that are taken before groups are formed: whoever has said that it is ready isn't late."""
log: Final = logging.getLogger("lossycoll")


class DirectoryServer:
    """Serves from when it is made until ``close``.

    ``host``: the numeric address that it listens on. ``port``: 0: any. ``secret``: what peers must
    have; None: all is in clear. ``session``: as for :class:`Directory`. One that stands by takes
    over its peers. ``owner``: None: it is nobody's. ``bound``: sockets that have the address
    already, which are the server's from then on; None: it makes them. RendezvousError: the port is
    taken, or the address isn't this machine's.
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
        self._connectivity_key = "", b""
        """Session of the key, and the key."""
        ports = bound or bound_to(host, port)
        try:
            # For whoever listens here next, while connections of this one are on their way out.
            ports.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            ports.tcp.listen(MOST_PEERS)
            self._transport = Transport(
                swarm_keys(secret), strangers=_most_strangers(), handshake=HANDSHAKE_SECONDS
            )
        except OSError as error:
            ports.close()
            raise RendezvousError(f"no directory at {host}:{port}: {error.strerror}") from error
        self.port: int = ports.port
        self._transport.listen(ports.tcp)
        self._reflexive = ReflexiveAddressServer(ports.udp, self._key)
        self._transport.watch(self._reflexive.fileno())
        self._owner = owner or NOBODY
        if self._owner.standby and session:
            self._directory.adopt(session)
        self._merge = PartitionMerge(time.monotonic, self._directory)
        self._service = DirectoryService(
            self._directory,
            self._drop,
            merge_context=MergeContext(self._merge, self._owner, self._place),
        )
        self._sessions: dict[Peer, PeerSession] = {}
        self._has_warned = False
        self._probe = DirectoryProbe(self._merge, self._transport, host, self.port)
        self._stop = False
        self._leaves = False
        """Its owner is about to leave."""
        self._is_free = threading.Event()
        """And nobody needs the directory."""
        self._has_served_on = False
        """Somebody did."""
        self._thread = threading.Thread(target=self._run, name="lossycoll-directory", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Takes peers from now on, though its owner has been in no swarm."""
        self._service.begin()

    def adopt(self, session: str) -> None:
        """Peers of this swarm may come, when their directory has ended. While nobody is here."""
        self._directory.adopt(session)

    @property
    def counts(self) -> Counter[str]:
        """Counts of malformed messages."""
        return self._service.counts

    @property
    def reflexive_counts(self) -> ReflexiveAddressCounts:
        """Counts of datagrams at the UDP port."""
        return self._reflexive.counts

    def serve_on(self, seconds: float) -> None:
        """Returns when peers have had the rounds that the owner has had, ``seconds`` later at
        most."""
        if self._stop or self._transport.closed:
            return
        self._leaves = True
        self._transport.wake()
        self._is_free.wait(seconds)

    def close(self) -> None:
        """Ends the thread and all connections. Idempotent."""
        if self._stop:
            return
        self._stop = True
        if not self._transport.closed:
            self._transport.wake()
        self._thread.join()
        self._transport.close(FINISH_SECONDS if self._has_served_on else 0.0)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._stop:
                self._turn()
        finally:
            self._is_free.set()
            self._transport.unwatch(self._reflexive.fileno())
            self._reflexive.close()
            if not self._stop:  # by an error, which peers are to hear of
                self._transport.close()

    def _key(self) -> bytes:
        """Key of connectivity messages; the session is another's once this directory has adopted
        it."""
        session = self._directory.session
        if self._connectivity_key[0] != session:
            self._connectivity_key = session, key_of(self._secret, session)
        return self._connectivity_key[1]

    def _turn(self) -> None:
        until = max(0.001, self._probe.wakes() - time.monotonic())
        taken, events = 0, self._transport.poll(min(self._service.wait(), until))
        # All that has come is heard before groups form: who has said that it is ready isn't late.
        while events:
            taken += len(events)
            for event in events:
                self._take(event)
            events = self._transport.poll(0.0) if taken < AT_ONCE else []
        self._see_to_descriptors()
        self._service.turn()
        if self._leaves and not self._is_free.is_set():
            if self._directory.is_needed(self._owner.name):
                self._has_served_on = True
            else:
                self._is_free.set()
        self._probe.turn(self._owner.others())

    def _take(self, event: Event) -> None:
        if isinstance(event, Readable):
            self._reflexive.serve()
        elif self._probe.asks(event.peer):
            if self._probe.serve(event):
                self._redirect_peers()
        elif isinstance(event, Connected):
            connection = TransportConnection(self._transport, event.peer, event.own)
            self._sessions[event.peer] = self._service.admit(connection)
        elif event.peer in self._sessions:
            session = self._sessions[event.peer]
            self._connection(session).take(event)
            self._service.hear(session)
            if session.number >= 0:
                self._transport.admit(event.peer)

    def _redirect_peers(self) -> None:
        assert self._merge.to is not None
        log.info("directory: its peers turn to %s:%d", *self._merge.to)
        self._service.tell_all(Redirect(*self._merge.to))

    def _place(self, session: PeerSession) -> Address:
        """Address by which the other end of a connection finds this directory."""
        return self._probe.place(self._connection(session).own)

    def _connection(self, session: PeerSession) -> TransportConnection:
        assert isinstance(session.connection, TransportConnection)
        return session.connection

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

    def _drop(self, session: PeerSession) -> None:
        self._sessions.pop(self._connection(session).peer, None)
        session.connection.close()


def _most_strangers() -> int:
    """Their descriptors leave those of peers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return STRANGERS if hard == resource.RLIM_INFINITY else min(STRANGERS, hard // 4)
