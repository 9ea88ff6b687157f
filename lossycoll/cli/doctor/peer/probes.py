"""What measurements send: datagrams that no stranger can make, and the ports that they reach.

UDP packets go from a port to a port, as those of ranks do: a filter that lets answers in lets in
what it would let in of a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from .control import Control, number, numbers, plain

HEADER: Final = struct.Struct("!16sBxHIQ")
"""The session, the kind of measurement, its number, the packet's number, and when it was sent."""
PORT, SIZE, FLOW, BLAST, IDLE = range(1, 6)
IP_BYTES: Final = {socket.AF_INET: 28, socket.AF_INET6: 48}
"""Headers of IP and UDP."""
QUIET_SECONDS: Final = 0.4
"""Time in which packets may still come after the last one was sent."""
MOST_SECONDS: Final = 25.0
"""Longest wait for the end of a train."""
BUFFER: Final = 8 << 20
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PROBE = 10, 23, 3
_MEMINFO, _DROPS_AT = 55, 32
"""Linux's SO_MEMINFO, and the offset of SK_MEMINFO_DROPS in what it returns."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A packet. ``sent`` and ``came`` in ns, of two clocks; ``size`` without headers."""

    number: int
    sent: int
    came: int
    size: int


def open_udp(address: str, port: int) -> socket.socket:
    """A socket whose packets are never cut into fragments. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    end = socket.socket(family, socket.SOCK_DGRAM)
    try:
        end.bind((address, port))
        if family == socket.AF_INET:
            end.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PROBE)
        else:
            end.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PROBE)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        end.setblocking(False)
    except OSError:
        end.close()
        raise
    return end


def packet(control: Control, kind: int, run: int, at: int, size: int = 0) -> bytes:
    head = HEADER.pack(control.session, kind, run, at, time.monotonic_ns())
    return head + bytes(max(0, size - HEADER.size))


def take(
    end: socket.socket, control: Control, kind: int, run: int, most: int = 64
) -> list[tuple[Arrival, tuple[str, int]]]:
    """Packets of one measurement, with their senders; strangers' packets are dropped."""
    found = []
    address = control.address
    for _ in range(most):
        try:
            data, place = end.recvfrom(65536)
        except OSError:  # nothing more, or an ICMP message about something that was sent
            break
        came = time.monotonic_ns()
        if len(data) < HEADER.size or plain(str(place[0])) != address:
            continue
        session, its_kind, its_run, at, sent = HEADER.unpack_from(data)
        if session == control.session and (its_kind, its_run) == (kind, run):
            found.append((Arrival(at, sent, came, len(data)), (plain(place[0]), place[1])))
    return found


def send_train(
    end: socket.socket,
    to: tuple[str, int],
    control: Control,
    kind: int,
    run: int,
    sizes: Sequence[int],
    rate: float,
    seconds: float,
) -> tuple[int, float]:
    """Sends packets of these sizes at ``rate`` bytes per second, within ``seconds``. Returns how
    many, and how long that took. Those that the interface refuses are counted as sent."""
    control.receive("ready")
    begin = time.monotonic()
    due = begin
    count = 0
    for size in sizes:
        now = time.monotonic()
        if now - begin > seconds:
            break
        if due > now + 0.001:
            time.sleep(due - now)
        elif due < now - 0.05:
            due = now - 0.05  # what a sleep has lost isn't caught up with at once
        try:
            end.sendto(packet(control, kind, run, count, size), to)
        except BlockingIOError:
            select.select([], [end], [], 0.05)
        except OSError as error:
            if error.errno not in (errno.EMSGSIZE, errno.ENOBUFS, errno.ECONNREFUSED):
                break
        count += 1
        due += size / rate
    took = time.monotonic() - begin
    control.send("sent", count=count, ms=int(took * 1000))
    return count, took


def receive_train(
    end: socket.socket, control: Control, kind: int, run: int
) -> tuple[list[Arrival], int, float]:
    """Arrivals of a train, the number that was sent, and for how long (s)."""
    found: list[Arrival] = []
    control.send("ready")
    poll = select.poll()
    poll.register(end, select.POLLIN)
    poll.register(control.end, select.POLLIN)
    until = time.monotonic() + MOST_SECONDS
    told = None
    while (left := until - time.monotonic()) > 0:
        ready = dict(poll.poll(1000 * left))
        if not ready:
            break
        while some := take(end, control, kind, run):
            found += [one for one, _ in some]
        if told is None and (control.end.fileno() in ready or b"\n" in control.received):
            told = control.receive("sent")
            poll.unregister(control.end)
            until = time.monotonic() + QUIET_SECONDS
    told = told or control.receive("sent")
    count, ms = told.get("count"), told.get("ms")
    if not isinstance(count, int) or not isinstance(ms, int):
        count = ms = 0
    return [one for one in found if one.number < count], count, max(ms, 1) / 1000


def dropped_here(end: socket.socket) -> int:
    """Packets that this very socket had no room for."""
    try:
        counts = end.getsockopt(socket.SOL_SOCKET, _MEMINFO, _DROPS_AT + 4)
    except OSError:  # Linux before 4.12
        return 0
    return int(struct.unpack_from("I", counts, _DROPS_AT)[0])


MOST_PORTS: Final = 32
"""Most ports of a range that are tried, evenly spread."""
FREE_PORTS: Final = 14
"""Ports to try if there is no range."""
SECONDS: Final = 2.5
SEND_PAUSE: Final = 0.3


@dataclass
class Ports:
    """This end's. ``busy``: those of the range that something else has."""

    udp: list[socket.socket] = field(default_factory=list)
    tcp: list[socket.socket] = field(default_factory=list)
    busy: int = 0

    def close(self) -> None:
        for end in [*self.udp, *self.tcp]:
            end.close()


@dataclass(frozen=True)
class Reached:
    """Ports that one direction lets through."""

    tcp: dict[int, str]  # what became of each port that was tried: "" where it was reached
    udp: list[int]  # ports that were tried
    heard: list[int]  # numbers of ``udp`` from whose counterpart a packet came
    busy: int = 0  # ports of the receiver's range that something else has

    @property
    def is_open(self) -> bool:
        return bool(self.heard) and not any(self.tcp.values())


@dataclass(frozen=True)
class Reach:
    """Both directions. ``seen``: this end's address and port as the other end sees them, beside
    what they are here; None: no packet of it came."""

    out: Reached
    back: Reached
    seen: tuple[tuple[str, int], tuple[str, int]] | None
    targets: list[tuple[str, int]]
    """Addresses of the other end's UDP ports."""


def open_ports(address: str, ports: tuple[int, int]) -> Ports:
    """Ports as ranks would take them; (0, 0): any."""
    first, last = ports
    wanted = [0] * FREE_PORTS
    if first:
        count = min(MOST_PORTS, last - first + 1)
        step = (last - first) / max(1, count - 1)
        wanted = sorted({first + round(i * step) for i in range(count)})
    made = Ports()
    for port in wanted:
        with contextlib.ExitStack() as undo:
            try:
                udp = undo.enter_context(open_udp(address, port))
                tcp = undo.enter_context(socket.socket(udp.family, socket.SOCK_STREAM))
                tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tcp.bind((address, port))
                tcp.listen(8)
            except OSError:
                made.busy += 1
                continue
            undo.pop_all()
            tcp.setblocking(False)
            made.udp.append(udp)
            made.tcp.append(tcp)
    return made


def try_ports(control: Control, ports: Ports) -> Reach:
    mine_udp = [end.getsockname()[1] for end in ports.udp]
    mine_tcp = [end.getsockname()[1] for end in ports.tcp]
    said = control.swap("ports", udp=mine_udp, tcp=mine_tcp, busy=ports.busy)
    theirs_udp = numbers(said, "udp", MOST_PORTS, 65535)
    theirs_tcp = numbers(said, "tcp", MOST_PORTS, 65535)
    their_busy = number(said, "busy", 0, 65535)
    targets = [(control.address, port) for port in theirs_udp[: len(ports.udp)]]
    attempt = _Attempt(control, ports, targets, theirs_tcp)
    asyncio.run(attempt.run())
    heard = sorted(attempt.sources)
    first = heard[0] if heard else -1
    told = control.swap(
        "reached",
        udp=heard,
        tcp=sorted(attempt.accepted),
        seen=attempt.sources.get(first, ()),
        first=first + 1,
    )
    arrived = set(numbers(told, "tcp", MOST_PORTS, 65535))
    out = {
        port: "" if port in arrived else attempt.trouble.get(port, "no answer")
        for port in theirs_tcp
    }
    back = {port: "" if port in attempt.accepted else "nothing came" for port in mine_tcp}
    pairs = len(targets)
    arrived_udp = [one for one in numbers(told, "udp", MOST_PORTS, MOST_PORTS) if one < pairs]
    return Reach(
        Reached(out, theirs_udp[:pairs], arrived_udp, their_busy),
        Reached(back, mine_udp[:pairs], heard, ports.busy),
        _seen(told, ports),
        targets,
    )


def _seen(told: dict[str, object], ports: Ports) -> tuple[tuple[str, int], tuple[str, int]] | None:
    first = number(told, "first", 0, MOST_PORTS) - 1
    found = told.get("seen")
    if not (0 <= first < len(ports.udp) and isinstance(found, list) and len(found) == 2):
        return None
    address, port = found
    if not (isinstance(address, str) and address.isprintable() and isinstance(port, int)):
        return None
    own = ports.udp[first].getsockname()
    return (str(own[0]), int(own[1])), (address[:64], port)


@dataclass
class _Attempt:
    """Packets and connections of one end, to and from all ports."""

    control: Control
    ports: Ports
    targets: list[tuple[str, int]]
    tcp: list[int]
    sources: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By number of an own UDP port, where what came there is from."""
    accepted: set[int] = field(default_factory=set)
    trouble: dict[int, str] = field(default_factory=dict)

    async def run(self) -> None:
        for index, end in enumerate(self.ports.udp):
            asyncio.get_running_loop().add_reader(end, self._take, index, end)
        servers = [await asyncio.start_server(self._serve, sock=end) for end in self.ports.tcp]
        works = [self._send(), *map(self._connect, self.tcp)]
        await asyncio.wait(map(asyncio.ensure_future, works), timeout=SECONDS)
        for server in servers:
            server.close()

    async def _send(self) -> None:
        while True:
            for index, (end, to) in enumerate(zip(self.ports.udp, self.targets, strict=False)):
                with contextlib.suppress(OSError):
                    end.sendto(packet(self.control, PORT, 0, index), to)
            await asyncio.sleep(SEND_PAUSE)

    def _take(self, index: int, end: socket.socket) -> None:
        for arrival, place in take(end, self.control, PORT, 0):
            if arrival.number == index:
                self.sources[index] = place

    async def _connect(self, port: int) -> None:
        # From the address of the interface that ranks would use.
        own = (self.ports.tcp[0].getsockname()[0], 0) if self.ports.tcp else None
        try:
            _, writer = await asyncio.open_connection(self.control.address, port, local_addr=own)
            writer.write(self.control.session)
            writer.close()
        except OSError as error:
            self.trouble[port] = os.strerror(error.errno or 0).lower()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection, which may be anybody's."""
        session = self.control.session
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError):
            if await reader.readexactly(len(session)) == session:
                self.accepted.add(writer.get_extra_info("sockname")[1])
