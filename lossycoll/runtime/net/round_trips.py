"""Round trips to other hosts, by the kernel's own clock.

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
from collections.abc import Iterator, Mapping
from typing import Final

TRIES: Final = 3
"""Connections with each host: the quickest counts. Queues and busy processors only ever add."""
ENOUGH: Final = 2
"""Answers of a host after which the others aren't waited for: a lost packet costs no time."""
APART_SECONDS: Final = 0.01
"""From one connection with a host to the next, so that not all are in one burst of losses."""
SECONDS: Final = 0.9
"""For all of it: less than the second after which the kernel sends a lost packet again."""
RTT: Final = struct.Struct("@I")
RTT_AT: Final = 68
"""Offset of tcpi_rtt, in microseconds, in struct tcp_info of linux/tcp.h: its last field that all
kernels have is further on."""


def round_trips(
    places: Mapping[int, tuple[str, int]], tries: int = TRIES, seconds: float = SECONDS
) -> dict[int, float]:
    """Seconds there and back of the ``places`` that have answered, by number; all are measured at
    once. Takes the longest of the round trips and a little more."""
    best: dict[int, float] = {}
    answers = dict.fromkeys(places, 0)
    waiting: dict[int, tuple[int, socket.socket]] = {}  # by descriptor
    poller = select.poll()
    start, begun = time.monotonic(), 0
    with contextlib.ExitStack() as stack:
        while (now := time.monotonic()) < start + seconds:
            if begun < tries and now >= start + begun * APART_SECONDS:
                begun += 1
                for number, connection in _begun(places):
                    stack.enter_context(connection)
                    waiting[connection.fileno()] = number, connection
                    poller.register(connection, select.POLLOUT)
            missing = {number for number in places if answers[number] < min(ENOUGH, tries)}
            still = begun < tries or any(number in missing for number, _ in waiting.values())
            if not missing or not still:
                break
            until = start + (begun * APART_SECONDS if begun < tries else seconds)
            for fd, _ in poller.poll(max(0, math.ceil(1000 * (until - time.monotonic())))):
                poller.unregister(fd)
                number, connection = waiting.pop(fd)
                if (taken := _taken(connection)) > 0:
                    answers[number] += 1
                    best[number] = min(taken, best.get(number, math.inf))
    return best


def _begun(places: Mapping[int, tuple[str, int]]) -> Iterator[tuple[int, socket.socket]]:
    """Connections that are being made, but for hosts without a way, or for want of descriptors."""
    for number, (host, port) in places.items():
        try:
            connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError:
            return
        connection.setblocking(False)
        # As bytes: a str would load the codec for names.
        if connection.connect_ex((host.encode(), port)) in (0, errno.EINPROGRESS):
            yield number, connection
        else:
            connection.close()


def _taken(connection: socket.socket) -> float:
    """Seconds from the first packet to its answer, as the kernel has measured it; 0: it has not."""
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        return 0.0
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RTT_AT + RTT.size)
    if len(info) < RTT_AT + RTT.size:
        return 0.0
    return float(RTT.unpack_from(info, RTT_AT)[0]) * 1e-6
