"""How long a packet takes to other hosts and back, by the kernel's own clock.

A TCP connection is begun with a port at which the other listens. Its kernel answers, so that a busy
process there, or here, adds nothing; and the kernel here keeps the time. Nothing is sent over the
connection. docs/topology.md says what it is for.
"""

from __future__ import annotations

import contextlib
import errno
import math
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import Final

TRIES: Final = 3
"""Connections with each host, one after the other: the quickest counts. Queues and busy processors
only ever add, and a lost packet loses a try."""
SECONDS: Final = 0.9
"""For one try: less than the second after which the kernel sends a lost packet again."""
RTT: Final = struct.Struct("@I")
RTT_AT: Final = 68
"""Where struct tcp_info of linux/tcp.h has tcpi_rtt, in microseconds: its last field that all
kernels have is further on."""


def round_trips(
    places: Mapping[int, tuple[str, int]], tries: int = TRIES, seconds: float = SECONDS
) -> dict[int, float]:
    """Measures all of them at once. Takes ``tries`` round trips, or ``tries * seconds`` at most.

    Args:
        places: Numeric address and TCP port of each host, by its number.
        tries: Connections with each.
        seconds: How long one try may take.

    Returns:
        Seconds there and back, by number, of those that have answered.
    """
    best: dict[int, float] = {}
    for _ in range(tries):
        for number, found in _try(places, seconds).items():
            best[number] = min(found, best.get(number, math.inf))
    return best


def _try(places: Mapping[int, tuple[str, int]], seconds: float) -> dict[int, float]:
    found: dict[int, float] = {}
    end = time.monotonic() + seconds
    waiting: dict[int, tuple[int, socket.socket]] = {}
    poller = select.poll()
    with contextlib.ExitStack() as stack:
        for number, (host, port) in places.items():
            connection = _begun(host, port)
            if connection is None:
                continue
            stack.enter_context(connection)
            waiting[connection.fileno()] = number, connection
            poller.register(connection, select.POLLOUT)
        while waiting and (left := end - time.monotonic()) > 0:
            for fd, _ in poller.poll(math.ceil(1000 * left)):
                poller.unregister(fd)
                number, connection = waiting.pop(fd)
                if (taken := _taken(connection)) > 0:
                    found[number] = taken
    return found


def _begun(host: str, port: int) -> socket.socket | None:
    """A connection that is being made; None: there is no way, or this process is short of
    descriptors. The address is numeric."""
    try:
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        return None
    connection.setblocking(False)
    # As bytes: a str would load the codec for names.
    if connection.connect_ex((host.encode(), port)) in (0, errno.EINPROGRESS):
        return connection
    connection.close()
    return None


def _taken(connection: socket.socket) -> float:
    """Seconds from the first packet to its answer, as the kernel has measured it; 0: it has not."""
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return 0.0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RTT_AT + RTT.size)
    if len(info) < RTT_AT + RTT.size:
        return 0.0
    return float(RTT.unpack_from(info, RTT_AT)[0]) * 1e-6
