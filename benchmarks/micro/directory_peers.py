"""A process of benchmarks.micro.directory: many peers without engines, one thread, a poller."""

from __future__ import annotations

import contextlib
import heapq
import json
import random
import resource
import secrets
import select
import socket
import sys
import time
from collections import Counter
from typing import Any, Final, Protocol

import zmq

from lossycoll.runtime.control.events import NUMBER_BYTES
from lossycoll.runtime.keys.secret import Secret, secret_of
from lossycoll.runtime.swarm.directory import LEASE
from lossycoll.runtime.swarm.directory_transport import swarm_keys
from lossycoll.runtime.swarm.protocol import (
    MOST_PEERS,
    VERSION,
    Averages,
    Heartbeat,
    Here,
    Join,
    Leave,
    Message,
    Ready,
    Serves,
    pack,
)
from lossycoll.runtime.swarm.valkey_relay import INCARNATION_BYTES, RelayedConnection
from lossycoll.runtime.swarm.valkey_server import Notices, ValkeyServer, ValkeyUrl

BEAT_SECONDS: Final = LEASE / 4
READ: Final = 1 << 16


class Connection(Protocol):
    """A peer's with the directory."""

    def read(self) -> list[bytes]:
        """The messages that have come."""

    def write(self, body: bytes) -> None:
        """Sends a message."""


class Direct:
    """The connections of all peers with a directory that listens: one ROUTER has them."""

    def __init__(self, port: int, secret: Secret | None) -> None:
        self._place = f"tcp://127.0.0.1:{port}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)  # one that ends isn't hidden
        keys = swarm_keys(secret)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.listener.public)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.caller.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.caller.secret)
        self._is_sealed = keys is not None
        self._sent: Counter[int] = Counter()
        self.fd = int(self._socket.getsockopt(zmq.FD))
        self._came: dict[int, list[bytes]] = {}

    @property
    def waits(self) -> bool:
        """Whether something is there to be read; the descriptor says it once alone."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def connect(self, number: int) -> OneDirect:
        """Begins the connection of a peer."""
        self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, b"peer %d" % number)
        self._socket.connect(self._place)
        self._came[number] = []
        return OneDirect(self, number)

    def hear(self) -> set[int]:
        """Whose messages have come."""
        found = set()
        with contextlib.suppress(zmq.Again):
            while True:
                routing, body = self._socket.recv_multipart(zmq.DONTWAIT)
                found.add(int(routing.split()[1]))
                self._came[int(routing.split()[1])].append(body[NUMBER_BYTES * self._is_sealed :])
        return found

    def read(self, number: int) -> list[bytes]:
        """What has come for a peer."""
        found, self._came[number] = self._came[number], []
        return found

    def write(self, number: int, body: bytes) -> None:
        """Sends a message of a peer."""
        if self._is_sealed:
            body = self._sent[number].to_bytes(NUMBER_BYTES, "big") + body
            self._sent[number] += 1
        self._socket.send_multipart([b"peer %d" % number, body])

    def close(self) -> None:
        """Ends all connections."""
        self._socket.close()
        self._context.term()


class OneDirect:
    """One of them."""

    def __init__(self, of: Direct, number: int) -> None:
        self._of, self._number = of, number

    def read(self) -> list[bytes]:
        return self._of.read(self._number)

    def write(self, body: bytes) -> None:
        self._of.write(self._number, body)


class Wire:
    """A connection with the server, which never blocks: commands go, answers come."""

    def __init__(self, host: str, port: int) -> None:
        self.end = socket.create_connection((host, port), 10.0)
        self.end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._came = bytearray()

    def send(self, *commands: tuple[bytes, ...]) -> None:
        """All of them at once; they are small, and the server reads."""
        parts = []
        for words in commands:
            parts.append(b"*%d\r\n" % len(words))
            parts += [b"$%d\r\n%s\r\n" % (len(word), word) for word in words]
        self.end.sendall(b"".join(parts))

    def answers(self) -> list[Any]:
        """Those that have come as a whole."""
        self._came += self.end.recv(READ)
        found, at = [], 0
        while (one := self._parsed(at)) is not None:
            at = one[1]
            found.append(one[0])
        del self._came[:at]
        return found

    def _parsed(self, at: int) -> tuple[Any, int] | None:
        end = self._came.find(b"\r\n", at)
        if end < 0:
            return None
        kind, rest, at = self._came[at : at + 1], bytes(self._came[at + 1 : end]), end + 2
        if kind == b"$":
            end = at + int(rest)
            return (bytes(self._came[at:end]), end + 2) if len(self._came) >= end + 2 else None
        if kind != b"*":
            return rest, at
        values = []
        for _ in range(int(rest)):
            one = self._parsed(at)
            if one is None:
                return None
            value, at = one
            values.append(value)
        return values, at


class ByServer(RelayedConnection):
    """A peer's end by a valkey server: as ``valkey_relay`` has it, without a thread."""

    def __init__(self, place: tuple[str, int], notices: Notices, inbox: str, key: bytes | None):
        super().__init__(self._publish, key, Counter(), connects=True)
        self._inbox = notices.channel(inbox).encode()
        self._incarnation = secrets.token_bytes(INCARNATION_BYTES)
        own = notices.channel(self._incarnation.hex()).encode()
        self._hears, self.says = Wire(*place), Wire(*place)
        self._hears.send((b"SUBSCRIBE", own, notices.news.encode()))
        listening = 0
        while listening < 2:
            listening += len(self._hears.answers())
        self._own, self.fd = own, self._hears.end.fileno()

    def read(self) -> list[bytes]:
        for kind, channel, frame in self._hears.answers():
            if kind == b"message" and channel == self._own:
                self.put(frame)
        return super().read()

    def close(self) -> None:
        self._hears.end.close()
        self.says.end.close()

    def _publish(self, frame: bytes) -> bool:
        said = b"PUBLISH", self._inbox, self._incarnation + frame
        self.says.send(said, (b"PUBSUB", b"NUMSUB", self._inbox))
        return True


class Peer:
    """One. It reads of what it is told how it begins, and no more."""

    def __init__(self, name: str, number: int, connection: Connection) -> None:
        self.connection = connection
        self.number = number
        self.pace = random.Random(number).random()
        """Of a round's time, until it is ready: a directory learns how long each takes."""
        self.has_joined = False
        self.heard = time.monotonic()
        self.group = 0
        """Of the round that is on, as it was told of it."""
        self.say(Join(VERSION, name, secrets.token_hex(16), MOST_PEERS, "0" * 16, 0))

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.connection.write(pack(message))

    def hear(self) -> bool:
        """What has come. Returns whether it was what this peer waits for."""
        found = False
        self.heard = time.monotonic()
        for body in self.connection.read():
            if body.startswith(b'["joined"'):
                place = f"10.{self.number >> 8 & 255}.{self.number & 255}.1"
                schema = "5c" * 16
                self.say(Here(place, 4000), Serves(place, 5000, 1), Averages(schema, ""))
            elif body.startswith(b'["agreed",""'):
                found = self.has_joined = True
            elif body.startswith(b'["group"'):
                found, self.group = True, int(body.split(b",", 3)[2])
        return found


class Peers:
    """Those of this process."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._name = config["name"]
        self._secret: Secret | None = secret_of(config["secret"]) if config["secret"] else None
        self._port, self._join = config["port"], config["join"]
        self._peers: dict[int, Peer] = {}
        self._hear: dict[int, Peer] = {}
        """By the descriptor by which they do."""
        self._say: dict[int, Wire] = {}
        """By that by which they say something to a server."""
        self._poller = select.epoll()
        self._beats: list[tuple[float, int]] = []
        self._draw = random.Random(self._name)
        self._are_in = False
        """All have joined; until then answers wait behind those of others."""
        self._direct: Direct | None = None
        if self._join:
            self._reach_server()
        else:
            self._direct = Direct(self._port, self._secret)
            self._poller.register(self._direct.fd, select.EPOLLIN)

    def _reach_server(self) -> None:
        address = ValkeyUrl.of(self._join)
        server = ValkeyServer(address)
        self._notices = Notices(server, address.prefix, self._secret)
        claimed = self._notices.claim("", False)
        assert claimed is not None
        self._inbox = claimed.notice.inbox
        self._place = address.host, address.port
        self._key = self._notices.frames_key

    def join(self, count: int) -> dict[str, Any]:
        """All come at once. Returns when the last one has joined."""
        waiting = set(range(count))
        for number in range(count):
            self._come(number)
            waiting -= self._turn(0.0)
        while waiting:
            waiting -= self._turn(0.1)
        for peer in self._peers.values():
            peer.heard = time.monotonic()
        self._are_in = True
        return {"at": time.monotonic()}

    def _come(self, number: int) -> None:
        peer = self._peers[number] = Peer(
            f"{self._name}, {number}", number, self._connection(number)
        )
        if isinstance(peer.connection, ByServer):
            self._hear[peer.connection.fd] = peer
            self._poller.register(peer.connection.fd, select.EPOLLIN)
        heapq.heappush(self._beats, (time.monotonic() + BEAT_SECONDS * self._draw.random(), number))

    def _connection(self, number: int) -> Connection:
        if self._direct is not None:
            return self._direct.connect(number)
        made = ByServer(self._place, self._notices, self._inbox, self._key)
        self._say[made.says.end.fileno()] = made.says
        self._poller.register(made.says.end.fileno(), select.EPOLLIN)
        return made

    def _turn(self, seconds: float) -> set[int]:
        """Returns who has heard what it waits for."""
        heard: list[Peer] = []
        direct = self._direct
        for fd, _ in self._poller.poll(0.0 if direct is not None and direct.waits else seconds):
            if fd in self._say:
                self._say[fd].answers()  # how many have heard it
            elif fd in self._hear:
                heard.append(self._hear[fd])
        if direct is not None:
            heard += [self._peers[number] for number in direct.hear()]
        found = {peer.number for peer in heard if peer.hear()}
        for peer in heard:
            if isinstance(peer.connection, ByServer) and peer.connection.broken:
                raise SystemExit(f"{self._name}: peer {peer.number} has lost the directory")
        now = time.monotonic()
        while self._beats and self._beats[0][0] <= now:
            _, number = heapq.heappop(self._beats)
            peer = self._peers[number]
            if now - peer.heard > LEASE and self._are_in:
                raise SystemExit(f"{self._name}: the directory says nothing to peer {number}")
            if peer.has_joined:
                peer.say(Heartbeat(0))
            heapq.heappush(self._beats, (now + BEAT_SECONDS, number))
        return found

    def round(self, seconds: float) -> dict[str, Any]:
        """All are ready, at once or within some seconds. Returns when the last one was, and had
        been told of its group."""
        order = list(self._peers)
        self._draw.shuffle(order)
        begin, told = time.monotonic(), 0.0
        times = {number: begin + seconds * self._peers[number].pace for number in order}
        waiting, left = set(order), sorted(order, key=lambda one: -times[one])
        ready = begin
        while waiting:
            while left and times[left[-1]] <= time.monotonic():
                self._peers[left.pop()].say(Ready(1.0))
                ready = time.monotonic()
            heard = self._turn(0.01 if left else 0.1)
            if heard:
                waiting -= heard
                told = time.monotonic()
        groups = sorted({peer.group for peer in self._peers.values()})
        return {"ready": ready, "told": told, "groups": groups}

    def rest(self, seconds: float) -> dict[str, Any]:
        """Nobody has anything to say but that it lives."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._turn(left)
        return {}

    def leave(self) -> dict[str, Any]:
        """All go at once."""
        for peer in self._peers.values():
            peer.say(Leave())
        return {}

    def close(self) -> None:
        if self._direct is not None:
            self._direct.close()
        for peer in self._peers.values():
            if isinstance(peer.connection, ByServer):
                peer.connection.close()


def main() -> int:
    config = json.loads(sys.argv[1])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    peers = Peers(config)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        what, *rest = json.loads(line)
        if what == "join":
            found = peers.join(config["peers"])
        elif what == "round":
            found = peers.round(*rest)
        elif what == "rest":
            found = peers.rest(*rest)
        else:
            found = peers.leave()
        print(json.dumps(found), flush=True)
    peers.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
