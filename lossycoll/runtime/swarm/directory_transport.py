"""Transport of messages between a peer and a directory. The rules of both ends (client.py,
service.py) stand on :class:`Connection` and :class:`DirectoryTransport` alone. So a server that
passes messages on can take the place of the control transport, and no rule is there twice."""

from __future__ import annotations

from typing import Final, Protocol
from weakref import WeakValueDictionary

from lossycoll.runtime.control import events
from lossycoll.runtime.control.context import Keys, keys_of
from lossycoll.runtime.control.schema import Address
from lossycoll.runtime.control.transport import STRANGERS, Transport
from lossycoll.runtime.keys.secret import Secret

CONNECT_SECONDS: Final = 5.0
HANDSHAKE_SECONDS: Final = 30.0
"""Thousands may come at once, when their directory has ended: the last waits for the others."""
FINISH_SECONDS: Final = 0.5
"""Time that the end of a transport waits for the last messages to be read."""


class Connection(Protocol):
    """A connection: whole messages both ways, in order, until it breaks."""

    @property
    def broken(self) -> str:
        """Why nothing comes or goes any more; "": it isn't broken."""

    @property
    def reached(self) -> bool:
        """True if the other end is there; it may not have said anything yet."""

    def read(self) -> list[bytes]:
        """The messages that have come."""

    def write(self, body: bytes) -> None:
        """Sends a message, without waiting."""

    def finish(self) -> None:
        """Nothing more is sent: the connection ends when what was is read."""

    def close(self) -> None:
        """Ends it, unless it finishes. Idempotent."""


class DirectoryTransport(Protocol):
    """Transport of a peer to directories: its thread's alone, but for :meth:`wake`."""

    def reach(self, place: Address, session: str) -> Connection:
        """Begins a connection with the directory at a place, for a peer of a session ("": of none
        yet). OSError: there is none."""

    def wait(self, seconds: float) -> None:
        """Wait for a message, a call of :meth:`wake`, or so many seconds."""

    def wake(self) -> None:
        """Ends a wait; by any thread, until :meth:`end`."""

    def end(self) -> None:
        """Ends all connections, when what was sent has been read. Idempotent."""


class TransportConnection:
    """A :class:`Connection` by the control transport; :meth:`take` has what it tells of the peer.
    ``own``: the numeric address of this end; "": the transport knows."""

    def __init__(self, transport: Transport, peer: events.Peer, own: str = "") -> None:
        self.peer = peer
        self.broken = ""
        self._transport = transport
        self._own = own
        self._came: list[bytes] = []
        self._finishes = False

    @property
    def own(self) -> str:
        """The numeric address of this end; "": it isn't known yet."""
        self._own = self._own or self._transport.own(self.peer)
        return self._own

    @property
    def reached(self) -> bool:
        return bool(self.own)

    def take(self, event: events.Event) -> None:
        if isinstance(event, events.Received):
            self._came.append(event.body)
        elif isinstance(event, events.Closed):
            self.broken = event.why
        elif isinstance(event, events.Refused):
            self.broken = "nobody listens there"

    def read(self) -> list[bytes]:
        found, self._came = self._came, []
        return found

    def write(self, body: bytes) -> None:
        """That it has broken is an event."""
        self._transport.send(self.peer, body)

    def finish(self) -> None:
        self._finishes = True
        self._transport.finish(self.peer)

    def close(self) -> None:
        if not self._finishes:
            self._transport.drop(self.peer)


class ZmqDirectoryTransport:
    """The :class:`DirectoryTransport` to directories that listen, and of these. ``secret``: the
    swarm's; None: all is in clear. ``strangers``: as for :class:`Transport`. OSError: the process
    is short of descriptors."""

    def __init__(self, secret: Secret | None, strangers: int = STRANGERS) -> None:
        self.transport = Transport(
            swarm_keys(secret), strangers=strangers, handshake=HANDSHAKE_SECONDS
        )
        self._connections = WeakValueDictionary[events.Peer, TransportConnection]()
        """Those that somebody still has."""

    def reach(self, place: Address, session: str) -> TransportConnection:
        return self._known(self.transport.connect(place))

    def _known(self, peer: events.Peer, own: str = "") -> TransportConnection:
        connection = self._connections[peer] = TransportConnection(self.transport, peer, own)
        return connection

    def take(self, event: events.Event) -> TransportConnection | None:
        """Returns a connection that another end has made; None: the event says of none."""
        if isinstance(event, events.Readable):
            return None
        if connection := self._connections.get(event.peer):
            connection.take(event)
        elif isinstance(event, events.Connected):
            return self._known(event.peer, event.own)
        return None

    def wait(self, seconds: float) -> None:
        for event in self.transport.poll(seconds):
            self.take(event)

    def wake(self) -> None:
        if not self.transport.closed:
            self.transport.wake()

    def end(self) -> None:
        self.transport.close(FINISH_SECONDS)


def swarm_keys(secret: Secret | None) -> Keys | None:
    """Derive the keys of directories and peers; None: all is in clear."""
    return None if secret is None else keys_of(secret, "swarm")
