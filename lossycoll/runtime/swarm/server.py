"""A directory that listens: one thread, a transport that has all its connections, and a UDP port
that tells peers their reflexive addresses as STUN does."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lossycoll.errors import RendezvousError
from lossycoll.runtime.control.events import Event, Peer, Readable
from lossycoll.runtime.control.schema import Malformed
from lossycoll.runtime.engine.host import close_in_children
from lossycoll.runtime.keys.secret import Secret

from . import ice_agent
from .directory import PATIENCE, Directory
from .directory_transport import FINISH_SECONDS, ZmqDirectoryTransport
from .ice_agent import CONNECTIVITY_BYTES, DIRECTORY, ConnectivityMessage, Forged, Kind
from .partition_merge import DirectoryProbe, PartitionMerge
from .protocol import MOST_PEERS, Redirect
from .service import NOBODY, STRANGERS, DirectoryService, Owner, PeerSession

SPARE_DESCRIPTORS: Final = 8  # fewer than these are left: the process is short of them
AT_ONCE: Final = 2 * MOST_PEERS
"""Events that are taken before groups are formed: whoever has said that it is ready isn't late."""
log: Final = logging.getLogger("lossycoll")
TRIES: Final = 16  # to find a port that is free in TCP and UDP, where any will do
RATE: Final = 500.0  # answers per second at most, in the long run: a full swarm asks for 273;
BURST: Final = float(MOST_PEERS)  # and at once: all peers may come together
TAKEN_AT_ONCE: Final = 64
"""Datagrams that are looked at before the directory turns to its peers again."""
IP_PKTINFO: Final = 8


class DirectoryServer:
    """Serves from when it is made until ``close``. ``host``: the numeric address that it listens
    on. ``port``: 0: any. ``secret``: what peers must have; None: all is in clear. ``session``: as
    for :class:`Directory`. One that stands by takes over its peers. ``bound``: sockets that have
    the address already, which are the server's from then on; None: it makes them. ``waits``: as for
    :class:`.service.DirectoryService`. RendezvousError: the port is taken, or the address isn't
    this machine's."""

    def __init__(
        self,
        host: str,
        port: int,
        secret: Secret | None = None,
        *,
        shape: Sequence[int] = (),
        patience: float = PATIENCE,
        session: str = "",
        owner: Owner = NOBODY,
        bound: Ports | None = None,
        waits: float = 0.0,
    ) -> None:
        self._secret = secret
        self._directory = Directory(time.monotonic, shape=shape, patience=patience, session=session)
        self._connectivity_key = "", b""  # session of the key, and the key
        ports = bound or bound_to(host, port)
        try:
            # For whoever listens here next, while connections of this one are on their way out.
            ports.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            ports.tcp.listen(MOST_PEERS)
            self._links = ZmqDirectoryTransport(secret, _most_strangers())
        except OSError as error:
            ports.close()
            raise RendezvousError(f"no directory at {host}:{port}: {error.strerror}") from error
        self.port: int = ports.port
        self._transport = self._links.transport
        self._transport.listen(ports.tcp)
        self.reflexive = ReflexiveAddressServer(ports.udp, self._key)
        self._transport.watch(self.reflexive.fileno())
        self._owner = owner
        if self._owner.standby and session:
            self._directory.adopt(session)
        self._merge = PartitionMerge(time.monotonic, self._directory)
        self._service = DirectoryService(
            self._directory, owner=self._owner, merge=self._merge, waits=waits
        )
        self.counts: Counter[str] = self._service.counts
        self._sessions: dict[Peer, PeerSession] = {}
        self._has_warned = False
        self._probe = DirectoryProbe(self._merge, self._links, host, self.port)
        self._stop = False
        self._leaves = False  # its owner is about to leave
        self._is_free = threading.Event()  # and nobody needs the directory
        self._has_served_on = False  # somebody did
        self._thread = threading.Thread(target=self._run, name="lossycoll-directory", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Takes peers from now on, though its owner has been in no swarm."""
        self._service.begin()

    def adopt(self, session: str) -> None:
        """Peers of this swarm may come, when their directory has ended. While nobody is here."""
        self._directory.adopt(session)

    def serve_on(self, seconds: float) -> None:
        """Returns when peers have had the rounds that the owner has had, ``seconds`` later at
        most."""
        if self._stop or self._transport.closed:
            return
        self._leaves = True
        self._links.wake()
        self._is_free.wait(seconds)

    def close(self) -> None:
        if self._stop:
            return
        self._stop = True
        self._links.wake()
        self._thread.join()
        self._transport.close(FINISH_SECONDS if self._has_served_on else 0.0)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            while not self._stop:
                self._turn()
        finally:
            self._is_free.set()
            self._transport.unwatch(self.reflexive.fileno())
            self.reflexive.close()
            if not self._stop:  # by an error, which peers are to hear of
                self._transport.close()

    def _key(self) -> bytes:
        """Key of connectivity messages; the session is another's once this directory has adopted
        it."""
        session = self._directory.session
        if self._connectivity_key[0] != session:
            self._connectivity_key = session, ice_agent.key_of(self._secret, session)
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
        client = self._owner.client()
        to = self._probe.turn(client.directories.heard if client else ())
        if to is not None:
            log.info("directory: its peers turn to %s:%d", *to)
            self._service.tell_all(Redirect(*to))
        self._service.turn()
        if self._leaves and not self._is_free.is_set():
            if self._directory.is_needed(self._owner.name):
                self._has_served_on = True
            else:
                self._is_free.set()

    def _take(self, event: Event) -> None:
        if isinstance(event, Readable):
            self.reflexive.serve()
            return
        peer, connection = event.peer, self._links.take(event)
        if connection is not None:
            own = connection.own
            self._sessions[peer] = self._service.admit(
                connection, lambda: self._sessions.pop(peer, None), lambda: self._probe.place(own)
            )
        elif session := self._sessions.get(peer):
            self._service.hear(session)
            if session.number >= 0:
                self._transport.admit(peer)

    def _see_to_descriptors(self) -> None:
        """When few are left, take as many as the process may have: libzmq says nothing of
        connections that it can't take. Not before, since whatever else runs in the process may not
        expect descriptors beyond 1,023."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if self._transport.highest < soft - SPARE_DESCRIPTORS or self._has_warned:
            return
        with contextlib.suppress(OSError, ValueError):
            if soft != hard:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                log.info("directory: up to %d descriptors, in place of %d", hard, soft)
                return
        self._has_warned = True
        log.warning(
            "directory: no descriptor is left for another peer, of which each takes one (%d of "
            "%d): raise the limit of the process that listens (ulimit -n)",
            self._transport.highest + 1,
            soft,
        )


def _most_strangers() -> int:
    """Their descriptors leave those of peers."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return STRANGERS if hard == resource.RLIM_INFINITY else min(STRANGERS, hard // 4)


@dataclass(frozen=True, slots=True)
class Ports:
    """Sockets that have the address, and don't block. ``tcp`` doesn't listen yet: who connects is
    refused."""

    tcp: socket.socket
    udp: socket.socket

    @property
    def port(self) -> int:
        return int(self.tcp.getsockname()[1])

    def close(self) -> None:
        self.tcp.close()
        self.udp.close()


def bound_to(host: str, port: int) -> Ports:
    """Takes a port, for as long as its sockets aren't closed. ``port``: 0: any that is free in TCP
    and UDP. RendezvousError: the port is taken, or the address isn't this machine's."""
    for turn in range(TRIES):
        try:
            tcp = bound(host, port, socket.SOCK_STREAM)
        except OSError as error:
            raise RendezvousError(f"no directory at {host}:{port}: {error.strerror}") from error
        number = tcp.getsockname()[1]
        try:
            return Ports(tcp, bound(host, number, socket.SOCK_DGRAM))
        except OSError as error:
            tcp.close()
            if port or turn == TRIES - 1:
                raise RendezvousError(
                    f"no directory at {host}:{number}: its UDP port: {error.strerror}; peers ask "
                    f"there for their reflexive addresses, so it needs the port in TCP and UDP"
                ) from error
    raise AssertionError


def bound(host: str, port: int, kind: socket.SocketKind) -> socket.socket:
    """A socket that has an address of this machine, and doesn't block. OSError: it can't be had."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, kind)
    try:
        # Where any will do, two might be given the same, as long as none listens.
        if port and kind == socket.SOCK_STREAM:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    made.setblocking(False)
    close_in_children(made)
    return made


@dataclass(eq=False)
class ReflexiveAddressServer:
    """STUN-like server beside a listener of TCP, on the same address and port. ``bound``: a socket
    that has the address; the server's from then on. ``key``: authenticates the swarm's connectivity
    messages, at present."""

    bound: socket.socket
    key: Callable[[], bytes]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._credit, self._credited = BURST, self.clock()
        self.counts: Counter[str] = Counter()
        """Datagrams, by what became of them: answered, forged, malformed, over_rate, unsent."""
        # An answer has to leave from the address that was asked, of several that the host may have.
        with contextlib.suppress(OSError):
            if self.bound.family == socket.AF_INET:
                self.bound.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
            else:
                self.bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)

    def fileno(self) -> int:
        return self.bound.fileno()

    def serve(self) -> None:
        """Answers what has come. An answer is as long as its question."""
        for _ in range(TAKEN_AT_ONCE):
            try:
                data, info, _, source = self.bound.recvmsg(CONNECTIVITY_BYTES + 1, 256)
            except OSError:  # nothing more, or what a router says of an answer
                return
            answer = self._answer(data, source)
            if answer is None:
                continue
            try:
                self.bound.sendmsg([answer], _back(info), 0, source)
                self.counts["answered"] += 1
            except OSError:
                self.counts["unsent"] += 1

    def _answer(self, data: bytes, source: tuple[Any, ...]) -> bytes | None:
        key = self.key()
        try:
            message = ice_agent.unpack(data, key)
            to, sender = message.receiver, message.sender
            if message.kind != Kind.CHECK or to != DIRECTORY or sender == DIRECTORY:
                raise Malformed("not for a directory")
        except Malformed as error:
            self.counts["forged" if isinstance(error, Forged) else "malformed"] += 1
            return None
        if not self._may_answer():
            self.counts["over_rate"] += 1
            return None
        reflexive = str(source[0]), int(source[1])
        return ice_agent.pack(
            ConnectivityMessage(
                Kind.ANSWER, DIRECTORY, message.sender, echo=message.nonce, reflexive=reflexive
            ),
            key,
        )

    def _may_answer(self) -> bool:
        now = self.clock()
        self._credit = min(BURST, self._credit + RATE * (now - self._credited))
        self._credited = now
        if self._credit < 1:
            return False
        self._credit -= 1
        return True

    def close(self) -> None:
        self.bound.close()


def _back(info: list[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
    """Return the ancillary data that makes an answer leave from the address that was asked."""
    for level, kind, data in info:
        if (level, kind) == (socket.IPPROTO_IP, IP_PKTINFO) and len(data) == 12:
            return [(level, kind, bytes(4) + data[4:8] + bytes(4))]
        if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO) and len(data) == 20:
            return [(level, kind, data[:16] + bytes(4))]
    return []
