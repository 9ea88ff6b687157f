"""Datagrams of the measurements: a header that no stranger can make, and zeros behind it."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .control import Control, plain

HEADER: Final = struct.Struct("!16sBxHIQ")
"""The session, the kind of measurement, its number, the packet's number, and when it was sent."""
PORT, SIZE, FLOW, BLAST, IDLE = range(1, 6)
IP_BYTES: Final = {socket.AF_INET: 28, socket.AF_INET6: 48}
"""Headers of IP and UDP."""
QUIET_SECONDS: Final = 0.4
"""Time in which packets may still come after the last one was sent."""
TRAIN_SECONDS: Final = 20.0
BUFFER: Final = 8 << 20
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PROBE = 10, 23, 3


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


def packet(control: Control, kind: int, run: int, number: int, size: int = 0) -> bytes:
    head = HEADER.pack(control.session, kind, run, number, time.monotonic_ns())
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
        session, its_kind, its_run, number, sent = HEADER.unpack_from(data)
        if session == control.session and (its_kind, its_run) == (kind, run):
            found.append((Arrival(number, sent, came, len(data)), (plain(place[0]), place[1])))
    return found


def send_train(
    end: socket.socket,
    to: tuple[str, int],
    control: Control,
    kind: int,
    run: int,
    sizes: Sequence[int],
    rate: float,
    seconds: float = TRAIN_SECONDS,
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
    until = time.monotonic() + TRAIN_SECONDS + 5
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
    """Packets that this very socket had no room for: /proc's count."""
    name = "udp6" if end.family == socket.AF_INET6 else "udp"
    try:
        with open(f"/proc/net/{name}", encoding="ascii") as file:
            rows = [line.split() for line in file][1:]
    except OSError:
        return 0
    inode = str(os.fstat(end.fileno()).st_ino)
    return sum(int(row[12]) for row in rows if len(row) > 12 and row[9] == inode)
