"""The control plane's sockets: every rank can reach the hub, and the hub every rank.

TCP by pyzmq: each rank has a ROUTER that listens, and a DEALER to the hub, which is rank 0 at
first. Messages are JSON objects that carry the group's token and the sender's rank; anything else
is counted and dropped. Used by one thread, but for ``open``.

After a cut, TCP tries an old connection ever less often. So who is silent is also asked over new
ones (:meth:`Star.ask`), which carry signs of life alone: what was under way on the old ones comes.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import select
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from lossycoll.errors import no_port

BATCH: Final = 256
LONGEST: Final = 1 << 20
PROBE_SECONDS: Final = 0.2
RECONNECT_MS: Final = 20

Message = dict[str, Any]


class Star:
    """One rank's end. ``open``, ``connect``, then the rest; ``close`` at the end.

    ``routes`` has the ranks that this one has heard at its own ROUTER. ``foreign`` counts what was
    dropped since it was malformed or without the token.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world
        self._token = ""
        self.hub = 0
        self.foreign = 0
        self.routes: dict[int, bytes] = {}
        self._endpoints: Sequence[tuple[str, int]] = ()
        self._context = zmq.Context()
        self._listening = self._socket(zmq.ROUTER)
        self._listening.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._to_hub: zmq.Socket[bytes] | None = None
        self._asked: dict[int, zmq.Socket[bytes]] = {}
        self._asking: dict[int, bytes] = {}
        """Ranks that have asked this one over a connection of its own, and which."""
        self._monitors: list[zmq.Socket[bytes]] = []
        self._settling_until = 0.0
        self.poller = zmq.Poller()
        self._watch(self._listening)

    def open(self, address: str, ports: tuple[int, int]) -> int:
        """Listens on ``address`` and a port of ``ports`` (first, last); 0: any.

        Returns the port. Raises RendezvousError when none can be had.
        """
        first, last = ports
        for port in range(first, last + 1):
            with contextlib.suppress(zmq.ZMQError):
                self._listening.bind(f"tcp://{_bracketed(address)}:{port or '*'}")
                endpoint = self._listening.getsockopt(zmq.LAST_ENDPOINT)
                assert isinstance(endpoint, bytes)
                return int(endpoint.rstrip(b"\0").rpartition(b":")[2])
        raise no_port(self._rank, self._world, address, ports)

    def connect(self, token: str, endpoints: Sequence[tuple[str, int]]) -> None:
        """``endpoints``: (host, port) of every rank."""
        self._token = token
        self._endpoints = endpoints
        self.follow(self.hub)

    def follow(self, hub: int) -> None:
        """From now on ``hub`` is the one to talk to."""
        self.hub = hub
        self.ask((), 1.0)
        if self._to_hub is not None:
            self._unwatch(self._to_hub)
            self._to_hub.close(0)
            self._to_hub = None
        if hub != self._rank:
            self._to_hub = self._socket(zmq.DEALER)
            self._watch(self._to_hub)
            self._to_hub.connect(self._place(hub))

    def send(self, message: Message, rank: int | None = None) -> bool:
        """To ``rank`` (the hub can), or to the hub. A broken connection loses it: silence tells.

        Returns False if it is known that there is no connection.
        """
        body = self._packed(message)
        try:
            if rank is not None:
                if rank not in self.routes:
                    return False
                self._listening.send_multipart([self.routes[rank], body], zmq.NOBLOCK)
            elif self._to_hub is not None:
                self._to_hub.send(body, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno != errno.EHOSTUNREACH
        return True

    def ask(self, ranks: Iterable[int], patience: float) -> None:
        """Asks ``ranks`` for a sign of life, each over a new connection; forgets earlier questions.

        The connection is tried anew every ``patience`` seconds, until it is made.
        """
        for end in self._asked.values():
            self.poller.unregister(end)
            end.close(0)
        self._asked.clear()
        for rank in ranks:
            with contextlib.suppress(zmq.ZMQError):  # short of descriptors: the old one must do
                end = self._socket(zmq.DEALER)
                self._asked[rank] = end
                self.poller.register(end, zmq.POLLIN)
                end.setsockopt(zmq.CONNECT_TIMEOUT, max(1, int(patience * 1000)))
                end.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
                end.connect(self._place(rank))
                end.send(self._packed({"k": "alive"}), zmq.NOBLOCK)

    def answer(self, rank: int) -> None:
        """The sign of life that ``rank`` has asked for."""
        with contextlib.suppress(zmq.ZMQError, KeyError):
            self._listening.send_multipart(
                [self._asking.pop(rank), self._packed({"k": "here"})], zmq.NOBLOCK
            )

    def receive(self) -> Iterator[Message]:
        """What has come, up to a bound."""
        for end in (self._to_hub, self._listening, *self._asked.values()):
            for _ in range(BATCH):
                if end is None:
                    break
                try:
                    frames = end.recv_multipart(zmq.NOBLOCK)
                except zmq.ZMQError:  # nothing left, or closed meanwhile
                    break
                message = self._parse(frames[-1])
                if message is None:
                    self.foreign += 1
                    continue
                if end is self._listening:
                    routes = self._asking if message["k"] == "alive" else self.routes
                    routes[message["r"]] = frames[0]
                yield message

    def disconnected(self) -> set[int]:
        """Ranks whose connections have broken since this was last asked."""
        events = set()
        for monitor in self._monitors:
            while monitor.poll(0):
                events.add(recv_monitor_message(monitor)["event"])
        if zmq.EVENT_DISCONNECTED in events:
            # The ROUTER may learn a little later than the monitor which connection it was.
            self._settling_until = time.monotonic() + PROBE_SECONDS
        elif not self.settling:
            return set()
        if self.hub != self._rank:
            return {self.hub}
        return {rank for rank in list(self.routes) if not self.send({"k": "beat"}, rank)}

    @property
    def settling(self) -> bool:
        """Whether :meth:`disconnected` is to be asked again soon."""
        return time.monotonic() < self._settling_until

    def ended(self, ranks: Iterable[int]) -> set[int]:
        """Those whose processes have ended: their hosts answer that nobody listens there.

        All are asked at once: a hub that waited for one after another would pass for dead itself.
        """
        found: set[int] = set()
        asked: dict[int, tuple[int, socket.socket]] = {}
        poller = select.poll()
        with contextlib.ExitStack() as ends:
            for rank in ranks:
                with contextlib.suppress(OSError):
                    places = socket.getaddrinfo(*self._endpoints[rank], type=socket.SOCK_STREAM)
                    end = ends.enter_context(socket.socket(*places[0][:2]))
                    end.setblocking(False)
                    code = end.connect_ex(places[0][4])
                    if code == errno.ECONNREFUSED:
                        found.add(rank)
                    elif code == errno.EINPROGRESS:
                        asked[end.fileno()] = rank, end
                        poller.register(end, select.POLLOUT)
            until = time.monotonic() + PROBE_SECONDS
            while asked and (left := until - time.monotonic()) > 0:
                for descriptor, _ in poller.poll(left * 1000):
                    poller.unregister(descriptor)
                    rank, end = asked.pop(descriptor)
                    if end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
                        found.add(rank)
        return found

    def close(self, linger_ms: int) -> None:
        self.ask((), 1.0)
        for end in (self._to_hub, self._listening):
            if end is not None:
                self._unwatch(end)
                end.close(linger_ms)
        self._context.term()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(kind)
        made.setsockopt(zmq.IPV6, 1)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.MAXMSGSIZE, LONGEST)
        return made

    def _watch(self, end: zmq.Socket[bytes]) -> None:
        monitor = end.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitors.append(monitor)
        self.poller.register(end, zmq.POLLIN)
        self.poller.register(monitor, zmq.POLLIN)

    def _unwatch(self, end: zmq.Socket[bytes]) -> None:
        monitor = end.get_monitor_socket()
        self.poller.unregister(end)
        self.poller.unregister(monitor)
        self._monitors.remove(monitor)
        end.disable_monitor()
        monitor.close(0)

    def _place(self, rank: int) -> str:
        host, port = self._endpoints[rank]
        return f"tcp://{_bracketed(host)}:{port}"

    def _packed(self, message: Message) -> bytes:
        return json.dumps({"r": self._rank, **message, "t": self._token}).encode()

    def _parse(self, body: bytes) -> Message | None:
        """The message, or None if it isn't one of this group's."""
        try:
            message = json.loads(body)
            token = message["t"].encode()
            sender = message["r"]
            known = isinstance(sender, int) and 0 <= sender < self._world and sender != self._rank
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        good = known and isinstance(message.get("k"), str)
        return message if good and hmac.compare_digest(token, self._token.encode()) else None


def reachable(host: str, port: int, timeout: float = 1.0) -> bool:
    """Whether something listens there: rank 0 of a group that still runs."""
    try:
        with socket.create_connection((host, port), timeout):
            return True
    except OSError:
        return False


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
