"""The measurements, one after another and each both ways: ports, size, loss, rate, idle flows.

They send datagrams that no stranger can make. UDP packets go from a port to a port, as those of
ranks do: a filter that lets answers in lets in what it would let in of a job.
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
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from typing import Final

from .arrivals import LIMITS, Arrival, Flow, Rate, flow_of, rate_of
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
    rtt_ms: float = 0.0


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


def dropped_here(end: socket.socket) -> int:
    """Packets that this very socket had no room for."""
    try:
        counts = end.getsockopt(socket.SOL_SOCKET, _MEMINFO, _DROPS_AT + 4)
    except OSError:  # Linux before 4.12
        return 0
    return int(struct.unpack_from("I", counts, _DROPS_AT)[0])


SMALLEST: Final = 576
LARGEST: Final = 9000
STEPS: Final = (64, 8, 1)
"""Steps of packet sizes, from pass to pass."""
SIZE_RATE: Final = 2e6
FLOW_PACKETS: Final = 1000
FLOW_RATE: Final = 1.25e6
FLOW_BYTES: Final = 1200
BLAST_SECONDS: Final = 2.0
IDLE_SECONDS: Final = (5, 10, 20, 31, 61, 121, 181, 301)
"""Idle times of flows; Linux forgets an unanswered flow after 30 s."""
GRACE_SECONDS: Final = 1.0
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
    )


def _seen(told: dict[str, object], ports: Ports) -> tuple[tuple[str, int], tuple[str, int]] | None:
    match told:
        case {"first": int(first), "seen": [str(address), int(port)]} if (
            0 < first <= len(ports.udp) and address.isprintable()
        ):
            own = ports.udp[first - 1].getsockname()
            return (str(own[0]), int(own[1])), (address[:64], port)
    return None


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


Tell = Callable[[str], None]


async def measure(control: Control, ports: Ports, tell: Tell) -> Found:
    tell("ports: TCP and UDP, both ways")
    found = await try_ports(control, ports)
    both = sorted(set(found.out.heard) & set(found.back.heard))
    for is_out in (control.leads, not control.leads):
        direction = found.out if is_out else found.back
        if direction.heard:
            pair = (both or direction.heard)[0]
            to = ports.targets[pair] if is_out else None
            await _Way(control, ports.udp[pair], to, direction, tell).measure()
    await _idle(control, ports, found, both[1:], tell)
    found.rtt_ms = control.rtt_ms
    return found


@dataclass(frozen=True)
class _Way:
    """One direction; ``to`` is None where this end receives."""

    control: Control
    end: socket.socket
    to: tuple[str, int] | None
    direction: Direction
    tell: Tell

    async def measure(self) -> None:
        control, limits, direction = self.control, self.control.limits, self.direction
        arrow = "to" if self.to else "from"
        headers = IP_BYTES[self.end.family]
        self.tell(f"{arrow} the other end: packet size")
        direction.mtu = await self._mtu(min(limits.mtu, LARGEST), headers)
        size = max(direction.mtu, SMALLEST) - headers
        seconds = FLOW_PACKETS * FLOW_BYTES / FLOW_RATE
        self.tell(f"{arrow} the other end: loss and order, {seconds:.0f} s")
        sizes = [min(FLOW_BYTES, size)] * FLOW_PACKETS
        arrivals, sent, _ = await self._train(FLOW, 0, sizes, FLOW_RATE)
        flow = flow_of(arrivals, sent)
        self.tell(
            f"{arrow} the other end: rate, up to {limits.budget >> 20} MiB in {BLAST_SECONDS:g} s "
            f"at up to {limits.rate} Mbit/s"
        )
        sizes = [size] * (limits.budget // size)
        before = dropped_here(self.end)
        arrivals, sent, took = await self._train(BLAST, 0, sizes, limits.rate * 1e6 / 8)
        if self.to is not None:
            said = await control.receive("way")
            limit = next((one for one in LIMITS if one == said.get("limit")), LIMITS[0])
            direction.flow = Flow(*_five(said.get("flow")))
            direction.rate = Rate(*_five(said.get("rate")), limit)
            direction.dropped = number(said, "dropped", 0, 1 << 31)
            return
        rate = rate_of(arrivals, sent, took, flow.lost)
        dropped = dropped_here(self.end) - before
        if 2 * dropped > rate.lost * sent > 0:
            rate = replace(rate, limit="receiver", burst=0)
        *figures, limit = astuple(rate)
        control.send("way", flow=astuple(flow), rate=figures, limit=limit, dropped=dropped)
        direction.flow, direction.rate, direction.dropped = flow, rate, dropped

    async def _train(
        self, kind: int, run: int, sizes: list[int], rate: float
    ) -> tuple[list[Arrival], int, float]:
        """Packets of these sizes at ``rate`` bytes per second: where they are received, the
        arrivals, the number that was sent, and for how long (s)."""
        if self.to is None:
            return await self._received(kind, run)
        await self._send(self.to, kind, run, sizes, rate)
        return [], 0, 0.0

    async def _send(
        self, to: tuple[str, int], kind: int, run: int, sizes: list[int], rate: float
    ) -> None:
        """Those that the interface refuses are counted as sent."""
        await self.control.receive("ready")
        begin = due = time.monotonic()
        end = begin + (BLAST_SECONDS if kind == BLAST else 10.0)
        count = 0
        for size in sizes:
            now = time.monotonic()
            if now > end:
                break
            # Nothing else is to be done meanwhile, and the loop's own sleep is a coarse one.
            if due > now + 0.001:
                time.sleep(due - now)
            due = max(due, now - 0.05)  # what a sleep has lost isn't caught up with at once
            try:
                self.end.sendto(packet(self.control, kind, run, count, size), to)
            except BlockingIOError:
                select.select([], [self.end], [], 0.05)
            except OSError as error:
                if error.errno not in (errno.EMSGSIZE, errno.ENOBUFS, errno.ECONNREFUSED):
                    break
            count += 1
            due += size / rate
        self.control.send("sent", count=count, ms=int((time.monotonic() - begin) * 1000))

    async def _received(self, kind: int, run: int) -> tuple[list[Arrival], int, float]:
        found: list[Arrival] = []

        def read() -> None:
            found.extend(one for one, _ in take(self.end, self.control, kind, run))

        loop = asyncio.get_running_loop()
        loop.add_reader(self.end, read)
        try:
            self.control.send("ready")
            told = await self.control.receive("sent")
            await asyncio.sleep(QUIET_SECONDS)
        finally:
            loop.remove_reader(self.end)
        count = number(told, "count", 0, 1 << 40)
        seconds = max(number(told, "ms", 0, 1 << 40), 1) / 1000
        return [one for one in found if one.number < count], count, seconds

    async def _mtu(self, most: int, headers: int) -> int:
        """The largest packet that arrives, in passes of ever smaller steps."""
        low, high = 0, most + 1
        for run, step in enumerate(STEPS):
            grid = {*range(max(low + step, SMALLEST), high, step), *([most] if not run else [])}
            sizes = [one - headers for one in sorted(grid) if one > low for _ in range(2)]
            arrivals, _, _ = await self._train(SIZE, run, sizes, SIZE_RATE)
            if self.to is None:
                low = max([low, *(one.size + headers for one in arrivals)])
                self.control.send("largest", size=low)
            else:
                low = number(await self.control.receive("largest"), "size", 0, most)
            high = min(high, low + step) if low else high
            if low >= most:
                high = low
        return low


def _five(said: object) -> tuple[float, float, float, float, float]:
    """Numbers that the other end says; zeros where they are none."""
    found = said if isinstance(said, list) and len(said) == 5 else [0] * 5
    a, b, c, d, e = (
        one if isinstance(one, (int, float)) and 0 <= one < 1e12 else 0 for one in found
    )
    return a, b, c, d, e


async def _idle(control: Control, ports: Ports, found: Found, pairs: list[int], tell: Tell) -> None:
    """Lifetimes of idle flows, to the other end and from it. Each pair of ports is
    used once after its silence, by one end; of the times, the longest that there are pairs for."""

    def send(pair: int, run: int) -> None:
        with contextlib.suppress(OSError):
            ports.udp[pair].sendto(packet(control, IDLE, run, pair), ports.targets[pair])

    fit = len(pairs) // 2
    times = [one for one in IDLE_SECONDS if one <= control.limits.idle][-fit:] if fit else []
    if not times:
        return
    used = pairs[: 2 * len(times)]
    for _ in range(2):  # both ends open the flow
        for pair in used:
            send(pair, 0)
        await asyncio.sleep(0.1)
    await control.swap("idle")
    begin = time.monotonic()
    own, other = (0, 1) if control.leads else (1, 0)
    for index, seconds in enumerate(times):
        tell(f"flows that are idle: {seconds} of {times[-1]} s")
        await asyncio.sleep(max(0.0, begin + seconds - time.monotonic()))
        for _ in range(3):
            send(used[2 * index + own], 1)
            await asyncio.sleep(0.02)
    await asyncio.sleep(GRACE_SECONDS)
    heard = [pair for pair in used if take(ports.udp[pair], control, IDLE, 1)]
    told = numbers(await control.swap("alive", pairs=heard), "pairs", MOST_PORTS, MOST_PORTS)
    for n, seconds in enumerate(times):
        found.out.idle[seconds] = used[2 * n + own] in told
        found.back.idle[seconds] = used[2 * n + other] in heard
