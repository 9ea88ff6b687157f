"""The control plane's transport: whole messages between processes, over ZeroMQ (pyzmq).

A process listens, connects, or both, by one :class:`Transport`; each connection is a *peer*, a
number that is never used again. What happens comes out of :meth:`Transport.poll` as events. Who is
at the other end says the first message: until the user calls :meth:`Transport.admit` it is a
stranger. What users rely on:

- A connection is made once: whoever wants another one after ``Closed`` or ``Refused`` connects
  again. A host that doesn't answer brings no event before the kernel gives up (two minutes), so
  users give up by a clock of their own: :meth:`Transport.drop`. Nothing is told of a dropped peer.
- :meth:`Transport.send` never waits. What is sent before a connection is there waits for it. A peer
  that leaves ``UNREAD`` messages unread is cut off. :meth:`Transport.drop` loses what wasn't sent
  yet; :meth:`Transport.finish` has the other end close after it has read all.
- Everything belongs to one thread, but for :meth:`Transport.wake`, which any may call. A fork is
  seen to: in the child the connections' descriptors are closed, so that a dead parent's peers hear
  of its end, and the transport is :attr:`Transport.closed`.

What strangers can do is bounded. A handshake that takes longer than ``handshake`` seconds ends, and
so does a connection that isn't admitted so long after it came. Of more than ``strangers`` that
aren't admitted the oldest goes, those of hosts in ``near`` last. If the user has heard of such a
connection, ``Closed`` tells its end. After a message that CURVE refuses libzmq takes no other one
of that connection, and doesn't always end it: this end's user hears nothing more of it.

One ROUTER socket has all connections, both ways (docs/control.md#transport): a DEALER for each
would take four descriptors a peer. ROUTER can't close one connection, so an incoming one is shut
down by its descriptor, if that still has the two addresses that it had when it was accepted; one
that was made here is disconnected by its endpoint, whose port has leading zeros of its own.

Long because what libzmq's monitor tells and what its socket hears change the same tables.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import socket
import struct
import time
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final

from . import events
from .context import SHARED, Keys
from .descriptors import close_copies, ends_of, shut_down
from .events import NEVER, NUMBER_BYTES, Connection, Event, Peer
from .schema import Address

if TYPE_CHECKING:
    import zmq

LONGEST: Final = 1 << 20
"""Bytes of one message."""
SEALED_BYTES: Final = 64
"""Room for what CURVE adds to a message, and for its number."""
UNREAD: Final = 20_000
"""Messages that wait for a peer that doesn't read; of more, the connection is given up."""
UNHEARD: Final = 128
"""Messages of one peer that wait for this process; the kernel keeps the others waiting."""
HANDSHAKE_SECONDS: Final = 5.0
CLOSED_UNHEARD: Final = "closed by whoever listens there"
"""Why a connection ended on which nothing has come: no such secret, or too many strangers."""
UNKNOWN: Final = "it doesn't speak as processes of this job do"
STRANGERS: Final = 64
FINISH_SECONDS: Final = 1.0
"""Time for the other end to close after :meth:`Transport.finish`."""
DRAIN_SECONDS: Final = 0.1
"""A connection that is over is told of within it, though messages of others keep coming."""
MOST_AT_ONCE: Final = 1024
"""Messages that one turn takes."""
MOST_ZEROS: Final = 64
"""Connections to one place are told from each other by so many zeros; more can't be at once."""
LEFT: Final = 0x0800
FORGED: Final = 0x2000
FAILED: Final = frozenset((LEFT, FORGED, 0x4000))
"""libzmq's events of handshakes that fail: by the end of a connection, a message, the roster."""
FIN: Final = b""
"""The last message of an end that finishes: the other one closes."""
_DONE, _FAILED, _HUNG_UP = range(3)
"""Handshakes: the last is of an end that closes during it, as one that measures a round trip."""
_EVENT: Final = struct.Struct("=HI")
_names: Final = itertools.count()
_here: Final[weakref.WeakSet[Transport]] = weakref.WeakSet()


@dataclass(eq=False)
class Transport:
    """All control connections of one user in this process; ``close`` at the end. OSError: the
    process is short of descriptors."""

    keys: Keys | None = None  # seal all connections; None: all is in clear
    _: KW_ONLY
    strangers: int = STRANGERS  # connections that have come and aren't admitted, at most
    near: Collection[str] = ()  # numeric addresses whose strangers are dropped after all others
    handshake: float | None = None  # seconds that a stranger has; None: the usual ones

    def __post_init__(self) -> None:
        global zmq  # noqa: PLW0603 (not before there is a transport: it takes 20 ms)
        import zmq

        self.counts: Counter[str] = Counter()
        """What came and was refused: connections (``handshake``, ``silent``, ``crowd``), messages
        (``foreign``), and what ZMTP or CURVE doesn't take as it comes (``forged``)."""
        self.highest = -1
        """The highest descriptor that a connection which came has had."""
        self.closed = False
        self._handshake = HANDSHAKE_SECONDS if self.handshake is None else self.handshake
        self._numbers = itertools.count(1)
        self._routing = b"\1" + secrets.token_bytes(8)
        """Begins the routing ids that are chosen here: libzmq aborts where another end has one."""
        self._peers: dict[Peer, Connection] = {}
        self._by_routing: dict[bytes, Connection] = {}
        self._by_fd: dict[int, Connection] = {}
        self._by_endpoint: dict[str, Connection] = {}
        self._endpoints_over: list[str] = []
        self._waiting: dict[Peer, Connection] = {}
        """Connections that have come and aren't admitted, the oldest first."""
        self._over: list[Connection] = []
        """Ended connections with messages that may be unread."""
        self._over_since = NEVER
        self._unheard: set[int] = set()
        """Descriptors of connections that ended before their first message was read."""
        self._outcome = _DONE
        """Outcome of the handshake of the monitor's last event."""
        self._events: list[Event] = []
        self._listens_at: Address = ("", 0)
        self._timers_at = NEVER
        self._poller = zmq.Poller()
        self._probes: dict[int, Connection] = {}
        context, self._roster = SHARED.acquire(self.keys)
        with contextlib.ExitStack() as undo:
            undo.callback(SHARED.release)
            try:
                self._open(context, undo)
            except zmq.ZMQError as error:
                raise OSError(error.errno, error.strerror) from error
            self._undo = undo.pop_all()
        _here.add(self)

    def _open(self, context: zmq.Context[zmq.Socket[bytes]], undo: contextlib.ExitStack) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        undo.callback(os.close, self._wake)
        self._router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        undo.callback(self._router.close, 0)
        self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        undo.callback(self._monitor.close, 0)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, UNREAD),
            (zmq.RCVHWM, UNHEARD),
            (zmq.MAXMSGSIZE, LONGEST + SEALED_BYTES),
            (zmq.HANDSHAKE_IVL, round(1000 * self._handshake)),
            (zmq.RECONNECT_IVL, 3_600_000),  # never: a connection that is over is disconnected
        ):
            self._router.setsockopt(option, value)
        told = (
            zmq.EVENT_ACCEPTED
            | zmq.EVENT_CONNECTED
            | zmq.EVENT_CLOSED
            | zmq.EVENT_DISCONNECTED
            | sum(FAILED)
        )
        # Never one that was: libzmq frees a name some time after its socket is closed.
        place = f"inproc://lossycoll.monitor.{next(_names)}"
        self._router.monitor(place, told)
        # libzmq's I/O thread waits where a monitor is full, and so would all connections.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(place)
        undo.callback(self._router.monitor, None, 0)
        for end in (self._router, self._monitor, self._wake):
            self._poller.register(end, zmq.POLLIN)

    # ---- connections ----

    def listen(self, listener: socket.socket) -> None:
        """Takes connections from now on. ``listener`` is the transport's from then on."""
        listener.setblocking(False)
        self._listens_at = listener.getsockname()[:2]
        if self.keys is not None and self._roster is not None:
            self._poller.register(self._roster.fd, zmq.POLLIN)
            self._router.setsockopt(zmq.CURVE_SERVER, 1)
            self._router.setsockopt(zmq.CURVE_SECRETKEY, self.keys.listener.secret)
            self._router.setsockopt(zmq.ZAP_DOMAIN, self.keys.plane.encode())
            self._router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._router.setsockopt(zmq.IPV6, ":" in self._listens_at[0])
        self._router.setsockopt(zmq.USE_FD, listener.detach())
        self._router.bind(_endpoint(self._listens_at))
        self._router.setsockopt(zmq.USE_FD, -1)
        if self.keys is not None:
            self._router.setsockopt(zmq.CURVE_SERVER, 0)

    def connect(self, place: Address) -> Peer:
        """Begins a connection; what is sent meanwhile waits for it. OSError: there is no such
        address, or ``MOST_ZEROS`` connections lead there."""
        for peer in itertools.islice(self._numbers, MOST_ZEROS):
            endpoint = _endpoint(place, 1 + peer % MOST_ZEROS)
            if endpoint not in self._by_endpoint:
                break
        else:
            many = f"{place[0]}:{place[1]}: {MOST_ZEROS} connections lead there already"
            raise OSError(errno.EADDRINUSE, many)
        routing = self._routing + peer.to_bytes(8, "big")
        one = Connection(peer, time.monotonic(), endpoint, place, routing)
        if self.keys is not None:
            self._router.setsockopt(zmq.CURVE_SERVERKEY, self.keys.listener.public)
            self._router.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.caller.public)
            self._router.setsockopt(zmq.CURVE_SECRETKEY, self.keys.caller.secret)
        self._router.setsockopt(zmq.IPV6, ":" in place[0])
        self._router.setsockopt(zmq.CONNECT_ROUTING_ID, routing)
        try:
            self._router.connect(endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"{place[0]}:{place[1]}: {error.strerror}") from error
        self._peers[peer] = self._by_routing[routing] = self._by_endpoint[endpoint] = one
        return peer

    def admit(self, peer: Peer) -> None:
        """The user knows whose connection it is, and keeps it."""
        self._waiting.pop(peer, None)

    def send(self, peer: Peer, body: bytes) -> bool:
        """Sends a message of 1 to ``LONGEST`` bytes; never waits. False: there is no connection."""
        assert body
        one = self._peers.get(peer)
        return one is not None and self._send(one, body)

    def _send(self, one: Connection, body: bytes) -> bool:
        if not one.routing or one.until < NEVER:
            return False
        if self.keys is not None:
            body = one.sent.to_bytes(NUMBER_BYTES, "big") + body
        one.sent += 1
        try:
            self._router.send_multipart([one.routing, body], zmq.DONTWAIT)
        except zmq.Again:
            self._end(one, "it doesn't read what is sent")
            return False
        except zmq.ZMQError:  # it is over, and its event is under way
            return False
        return True

    def drop(self, peer: Peer) -> None:
        """Ends a connection at once, without an event; what wasn't sent yet is lost."""
        one = self._peers.get(peer)
        if one is not None:
            self._cut(one)

    def finish(self, peer: Peer) -> None:
        """Ends a connection, without an event, when the other end has read what was sent."""
        one = self._peers.get(peer)
        if one is None:
            return
        if self._send(one, FIN):
            one.until = time.monotonic() + FINISH_SECONDS
            self._plan(one.until)
        else:
            self._cut(one)

    def watch(self, fd: int) -> None:
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        self._poller.unregister(fd)

    # ---- what comes ----

    def poll(self, seconds: float) -> list[Event]:
        """Events, after a wait of at most ``seconds``."""
        if not self._events:
            self._turn(seconds)
        found, self._events = self._events, []
        return found

    def wake(self) -> None:
        """Ends a wait of :meth:`poll`; by any thread, until ``close``."""
        os.eventfd_write(self._wake, 1)

    def close(self, linger: float = 0.0) -> None:
        """Frees all; up to ``linger`` seconds for what was sent to be read. Idempotent."""
        if self.closed:
            return
        self.closed = True
        end = time.monotonic() + linger
        for one in list(self._peers.values()):
            greeted = one.heard if one.is_ours else one.peer not in self._waiting
            if not (linger and greeted and self._send(one, FIN)):
                self._cut(one)
        while self._peers and (left := end - time.monotonic()) > 0:
            self._turn(left)
        _here.discard(self)
        self._undo.close()

    def own(self, peer: Peer) -> str:
        """The numeric address of this end of a connection; "": the other end isn't reached yet."""
        one = self._peers.get(peer)
        return "" if one is None else one.own

    # ---- one turn ----

    def _turn(self, seconds: float) -> None:
        self._disconnect_all()
        now = time.monotonic()
        due = 0.0 if self._over else min(seconds, self._timers_at - now)
        # Rounded up: a wait that ends before its time would turn in circles.
        wait = None if due == NEVER else max(0, int(1000 * due + 0.999))
        for end, _ in self._poller.poll(wait):
            if end == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            elif (one := self._probes.get(end)) is not None and one.probe is not None:
                code = one.probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                self._failed(one, code)  # 0: somebody listens there
            elif self._roster is not None and end == self._roster.fd:
                self._roster.serve()
            elif isinstance(end, int):
                self._events.append(events.Readable(end))
        # Whatever came over a connection that the monitor says is over is in the socket by now.
        self._hear_monitor()
        if self._hear_messages():
            self._unheard.clear()
            self._tell_over()
        elif time.monotonic() > self._over_since + DRAIN_SECONDS:
            self._tell_over()
        now = time.monotonic()
        if now >= self._timers_at:
            self._on_time(now)

    def _plan(self, at: float) -> None:
        self._timers_at = min(self._timers_at, at)

    def _on_time(self, now: float) -> None:
        for one in list(self._waiting.values()):
            if now - one.since < self._handshake:
                break
            self.counts["silent"] += 1
            self._turn_away(one, "it wasn't admitted in time")
        for one in [one for one in self._peers.values() if one.until <= now]:
            self._cut(one)
        oldest = next(iter(self._waiting.values()), None)
        stranger_at = NEVER if oldest is None else oldest.since + self._handshake
        self._timers_at = min([stranger_at, *(one.until for one in self._peers.values())])

    # ---- connections, by libzmq's monitor ----

    def _hear_monitor(self) -> None:
        while True:
            try:
                head, place = self._monitor.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                # Not sooner: of a connection that is over by now, whose end is told further on,
                # the descriptor may be a later one's.
                return self._cut_crowd()
            event, value = _EVENT.unpack(head)
            if event == zmq.EVENT_ACCEPTED:
                self._on_accepted(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._on_disconnected(value, greeted=self._outcome == _DONE)
            elif event in (zmq.EVENT_CONNECTED, zmq.EVENT_CLOSED):
                one = self._by_endpoint.get(place.decode())
                if one is not None and event == zmq.EVENT_CLOSED:
                    self._ask(one)
                elif one is not None:
                    self._take_descriptor(one, value)
            elif event == FORGED:
                self.counts["forged"] += 1
            # A handshake that fails is told just before the end of its connection.
            hung_up = event == LEFT and value in (errno.EPIPE, errno.ECONNRESET)
            self._outcome = _HUNG_UP if hung_up else _FAILED if event in FAILED else _DONE

    def _take_descriptor(self, one: Connection, fd: int) -> None:
        one.fd, one.ends = fd, ends_of(fd)
        self._by_fd[fd] = one

    def _on_accepted(self, fd: int) -> None:
        one = Connection(next(self._numbers), time.monotonic())
        self._take_descriptor(one, fd)
        self.highest = max(self.highest, fd)
        self._peers[one.peer] = self._waiting[one.peer] = one
        self._plan(one.since + self._handshake)

    def _cut_crowd(self) -> None:
        while len(self._waiting) > self.strangers:
            self.counts["crowd"] += 1
            oldest = min(
                self._waiting.values(), key=lambda other: (other.address in self.near, other.since)
            )
            self._turn_away(oldest, "others have come that weren't admitted")

    def _on_disconnected(self, fd: int, *, greeted: bool) -> None:
        one = self._by_fd.pop(fd, None)
        if one is None:
            return
        one.fd = -1
        if one.is_ours:
            self._disconnect(one)
        elif self._outcome == _FAILED:
            self.counts["handshake"] += 1
        if one.routing:
            if not self._over:
                self._over_since = time.monotonic()
            self._over.append(one)
        else:
            if greeted:
                self._unheard.add(fd)
            self._forget(one)

    def _tell_over(self) -> None:
        over, self._over = self._over, []
        for one in over:
            self._by_routing.pop(one.routing, None)
            if one.peer in self._peers:
                self._end(one, "closed by the other end" if one.heard else CLOSED_UNHEARD)

    def _end(self, one: Connection, why: str) -> None:
        """Ends a connection, and tells it, unless the user has."""
        tells = one.until == NEVER
        self._cut(one)
        if tells:
            self._events.append(events.Closed(one.peer, why))

    def _cut(self, one: Connection) -> None:
        """Ends a connection without an event. What has come over it is read and dropped."""
        if one.is_ours:
            self._disconnect(one)
            self._by_routing.pop(one.routing, None)
        elif one.fd >= 0 and one.ends is not None:
            shut_down(one.fd, one.ends)
        self._forget(one)

    def _disconnect(self, one: Connection) -> None:
        if self._by_endpoint.pop(one.endpoint, None) is not None:
            self._endpoints_over.append(one.endpoint)

    def _disconnect_all(self) -> None:
        """Not between a poll and what it is for: libzmq aborts where half a message was looked at
        and the other half goes with its connection."""
        over, self._endpoints_over = self._endpoints_over, []
        for endpoint in over:
            with contextlib.suppress(zmq.ZMQError):
                self._router.disconnect(endpoint)

    def _forget(self, one: Connection) -> None:
        self._peers.pop(one.peer, None)
        self._waiting.pop(one.peer, None)
        if one.probe is not None:
            if self._probes.pop(one.probe.fileno(), None) is not None:
                self._poller.unregister(one.probe.fileno())
            one.probe.close()
            one.probe = None

    # ---- why a connection failed: libzmq doesn't say it, but the kernel says it once more ----

    def _ask(self, one: Connection) -> None:
        self._disconnect(one)
        family = socket.AF_INET6 if ":" in one.place[0] else socket.AF_INET
        try:
            one.probe = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            code = one.probe.connect_ex(one.place)
        except OSError as error:  # short of descriptors
            code = error.errno or errno.EMFILE
        if one.probe is None or code != errno.EINPROGRESS:
            self._failed(one, code)
        else:
            self._probes[one.probe.fileno()] = one
            self._poller.register(one.probe.fileno(), zmq.POLLOUT)

    def _failed(self, one: Connection, code: int) -> None:
        self._cut(one)
        if code == errno.ECONNREFUSED:
            self._events.append(events.Refused(one.peer))
        else:
            why = os.strerror(code).lower() if code else "no answer"
            self._events.append(events.Closed(one.peer, why))

    # ---- messages ----

    def _hear_messages(self) -> bool:
        """Takes what has come. Returns whether that is all."""
        for _ in range(MOST_AT_ONCE):
            try:
                routing, *bodies = self._router.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return True
            one = self._by_routing.get(routing.bytes) or self._whose(routing)
            if one is not None:
                self._take(one, [body.bytes for body in bodies])
        return False

    def _whose(self, first: zmq.Frame) -> Connection | None:
        """The connection of a routing id that is new; None: it is over, or can't be told."""
        try:
            fd = int(first.get(zmq.SRCFD))
        except zmq.ZMQError:  # of an older ZMTP than ours: it goes as one that is silent
            self.counts["foreign"] += 1
            return None
        self._hear_monitor()  # which has been told of the connection before its message
        one = self._by_fd.get(fd)
        if one is None or one.is_ours:
            return None
        if one.routing or fd in self._unheard:
            # Of one of several that had this descriptor one after another.
            self._turn_away(one, UNKNOWN)
            return None
        one.routing = first.bytes
        self._by_routing[one.routing] = one
        return one

    def _turn_away(self, one: Connection, why: str) -> None:
        """Ends a connection, and tells it if the user has heard of that."""
        if (one.heard or one.is_ours) and one.peer in self._peers:
            self._end(one, why)
        else:
            self._cut(one)

    def _take(self, one: Connection, bodies: Sequence[bytes]) -> None:
        if one.peer not in self._peers or one.until < NEVER:
            return
        number = b"" if self.keys is None else one.taken.to_bytes(NUMBER_BYTES, "big")
        if len(bodies) != 1 or not bodies[0].startswith(number):
            self.counts["foreign"] += 1
            self._turn_away(one, UNKNOWN)
            return
        if not one.heard:
            self._events.append(events.Connected(one.peer, one.address, one.own))
        one.taken += 1
        body = bodies[0][len(number) :]
        if body == FIN:
            self._end(one, "it has finished")
        else:
            self._events.append(events.Received(one.peer, body))


def _endpoint(place: Address, zeros: int = 0) -> str:
    host, port = place
    return f"tcp://{f'[{host}]' if ':' in host else host}:{'0' * zeros}{port}"


def _abandon_all() -> None:
    """A forked child gives up its parent's transports, whose connections it would keep alive."""
    here = [one for one in _here if not one.closed]
    _here.clear()
    if not here:
        return
    listening = {one._listens_at for one in here if one._listens_at[1]}
    leading = {each.place for one in here for each in one._peers.values() if each.is_ours}
    for one in here:
        one.closed = True
        os.close(one._wake)
    close_copies(listening, leading)
    SHARED.forget()


os.register_at_fork(after_in_child=_abandon_all)
