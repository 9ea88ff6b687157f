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
MOST_AT_ONCE: Final = 64
"""Packets that are read in one go."""
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


@dataclass(frozen=True, slots=True)
class Flow:
    """Packets at a modest pace. Shares of what was sent; ``run``: the longest one of lost ones."""

    sent: float
    lost: float
    late: float
    doubled: float
    run: float


@dataclass(frozen=True, slots=True)
class Rate:
    """Packets as fast as they go. Rates in Mbit/s of UDP's data."""

    sent: float  # the sender's rate
    got: float  # what passes for long
    lost: float  # share of the packets
    burst: float = 0  # bytes that pass before the limit shows; 0: it doesn't
    queue_ms: float = 0.0  # what delay grows by until then
    limit: str = "none"  # of ``LIMITS``: what it is that lets no more pass


LIMITS: Final = ("none", "queue", "policer", "receiver")


@dataclass
class Direction:
    """What one direction lets through, and how. Where no UDP packet came, there is no more to
    measure than the ports."""

    tcp: dict[int, str]  # what became of each port that was tried: "" where it was reached
    udp: list[int]  # ports that were tried
    heard: list[int]  # numbers of ``udp`` from whose counterpart a packet came
    busy: int = 0  # ports of the receiver's range that something else has
    mtu: int = 0  # the largest packet that arrived whole, with its headers
    flow: Flow | None = None
    rate: Rate | None = None
    dropped: int = 0  # packets of the fastest train that the receiver's socket had no room for
    # seconds of silence that a flow survived, by whether it did
    idle: dict[int, bool] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return bool(self.heard) and not any(self.tcp.values())


@dataclass
class Found:
    """All that was measured, seen from this end. ``seen``: this end's address and port as the
    other end sees them, beside what they are here; None: no packet of it came."""

    out: Direction
    back: Direction
    seen: tuple[tuple[str, int], tuple[str, int]] | None
    rtt_ms: float


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
    end: socket.socket, control: Control, kind: int, run: int
) -> list[tuple[Arrival, tuple[str, int]]]:
    """Packets of one measurement, with their senders; strangers' packets are dropped."""
    found = []
    address = control.address
    for _ in range(MOST_AT_ONCE):
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


async def send_train(
    end: socket.socket,
    to: tuple[str, int],
    control: Control,
    kind: int,
    run: int,
    sizes: Sequence[int],
    rate: float,
    seconds: float,
) -> None:
    """Sends packets of these sizes at ``rate`` bytes per second, within ``seconds``. Those that the
    interface refuses are counted as sent."""
    await control.receive("ready")
    begin = time.monotonic()
    due = begin
    count = 0
    for size in sizes:
        now = time.monotonic()
        if now - begin > seconds:
            break
        # Nothing else is to be done meanwhile, and the loop's own sleep is a coarse one.
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
    control.send("sent", count=count, ms=int((time.monotonic() - begin) * 1000))


async def receive_train(
    end: socket.socket, control: Control, kind: int, run: int
) -> tuple[list[Arrival], int, float]:
    """Arrivals of a train, the number that was sent, and for how long (s)."""
    found: list[Arrival] = []
    loop = asyncio.get_running_loop()
    loop.add_reader(end, lambda: found.extend(one for one, _ in take(end, control, kind, run)))
    try:
        control.send("ready")
        told = await control.receive("sent")
        await asyncio.sleep(QUIET_SECONDS)
    finally:
        loop.remove_reader(end)
    count = number(told, "count", 0, 1 << 40)
    seconds = max(number(told, "ms", 0, 1 << 40), 1) / 1000
    return [one for one in found if one.number < count], count, seconds


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
    """This end's. ``busy``: those of the range that something else has. ``targets``: addresses of
    the other end's UDP ports, in the same order."""

    udp: list[socket.socket] = field(default_factory=list)
    tcp: list[socket.socket] = field(default_factory=list)
    busy: int = 0
    targets: list[tuple[str, int]] = field(default_factory=list)

    def close(self) -> None:
        for end in [*self.udp, *self.tcp]:
            end.close()


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


async def try_ports(control: Control, ports: Ports) -> Found:
    mine_udp = [end.getsockname()[1] for end in ports.udp]
    mine_tcp = [end.getsockname()[1] for end in ports.tcp]
    said = await control.swap("ports", udp=mine_udp, tcp=mine_tcp, busy=ports.busy)
    theirs_udp = numbers(said, "udp", MOST_PORTS, 65535)[: len(mine_udp)]
    theirs_tcp = numbers(said, "tcp", MOST_PORTS, 65535)
    their_busy = number(said, "busy", 0, 65535)
    ports.targets = [(control.address, port) for port in theirs_udp]
    attempt = _Attempt(control, ports)
    await attempt.run(theirs_tcp)
    heard = sorted(attempt.sources)
    told = await control.swap(
        "reached",
        udp=heard,
        tcp=sorted(attempt.accepted),
        seen=attempt.sources[heard[0]] if heard else (),
        first=heard[0] + 1 if heard else 0,
    )
    arrived = numbers(told, "tcp", MOST_PORTS, 65535)
    out = {
        port: "" if port in arrived else attempt.trouble.get(port, "no answer")
        for port in theirs_tcp
    }
    back = {port: "" if port in attempt.accepted else "nothing came" for port in mine_tcp}
    pairs = len(theirs_udp)
    arrived_udp = [one for one in numbers(told, "udp", MOST_PORTS, MOST_PORTS) if one < pairs]
    return Found(
        Direction(out, theirs_udp, arrived_udp, their_busy),
        Direction(back, mine_udp[:pairs], heard, ports.busy),
        _seen(told, ports),
        control.rtt_ms,
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
    sources: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By number of an own UDP port, where what came there is from."""
    accepted: set[int] = field(default_factory=set)
    trouble: dict[int, str] = field(default_factory=dict)

    async def run(self, tcp: list[int]) -> None:
        loop = asyncio.get_running_loop()
        for index, end in enumerate(self.ports.udp):
            loop.add_reader(end, self._take, index, end)
        servers = [await asyncio.start_server(self._serve, sock=end) for end in self.ports.tcp]
        works = [loop.create_task(one) for one in (self._send(), *map(self._connect, tcp))]
        await asyncio.wait(works, timeout=SECONDS)
        for work in works:
            work.cancel()
        for server in servers:
            server.close()
        for end in self.ports.udp:
            loop.remove_reader(end)

    async def _send(self) -> None:
        while True:
            for index, (end, to) in enumerate(
                zip(self.ports.udp, self.ports.targets, strict=False)
            ):
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
