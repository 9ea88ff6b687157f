"""TCP sockets: listeners, and libzmq's connections by their descriptors.

libzmq's are looked at and shut down here, and never closed but in a forked child.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Collection, Iterator
from typing import Any, Final, TypeAlias

from .schema import Address

SEGMENT_BYTES: Final = 1220
"""Of TCP: any path of IPv6 carries as much. Where a path carries less than the interfaces, and its
routers don't say so, larger segments would vanish for ever. Both ends keep to it."""
Ends: TypeAlias = tuple[Any, Any]
"""The addresses of both ends of a connection, this one's first."""


def listener(address: str, ports: tuple[int, int], backlog: int) -> socket.socket:
    """A TCP socket that listens. ``ports``: the first and the last that may be taken; 0: any.
    ``backlog``: connections that may wait to be taken. OSError: why the last port can't be had."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    first, last = ports
    failure = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    for port in range(first, last + 1):
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
            made.bind((address, port))
            made.listen(backlog)
        except OSError as error:
            made.close()
            failure = error
            continue
        made.setblocking(False)
        return made
    raise failure


@contextlib.contextmanager
def _end(fd: int) -> Iterator[socket.socket]:
    """A socket object of a descriptor, which stays open. OSError: it is no socket."""
    # The family is that of the longest addresses.
    end = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, fileno=fd)
    try:
        yield end
    finally:
        end.detach()


def ends_of(fd: int) -> Ends | None:
    """The addresses of both ends of a TCP connection; None: it is none, or over."""
    with contextlib.suppress(OSError), _end(fd) as end:
        return end.getsockname(), end.getpeername()
    return None


def shut_down(fd: int, ends: Ends) -> None:
    """Ends the connection between these ends, if the descriptor is still its."""
    with contextlib.suppress(OSError), _end(fd) as end:
        if (end.getsockname(), end.getpeername()) == ends:
            end.shutdown(socket.SHUT_RDWR)


def bound_answers(port: int | None, seconds: float) -> None:
    """Sets how long a read waits on each connection of this process to a remote ``port``."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for name in os.listdir("/proc/self/fd") if port else ():
        with contextlib.suppress(OSError), _end(int(name)) as end:
            if end.getsockname()[1:2] != (port,) and end.getpeername()[1:2] == (port,):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def close_copies(here: Collection[Address], there: Collection[Address]) -> None:
    """Closes a forked child's copies of listeners at the places ``here``, and of connections that
    have come to one or have been made to one of those ``there``.

    They are found by their addresses: a descriptor that was noted may be another's by now, and one
    that libzmq hasn't told of yet isn't noted.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), _end(int(name)) as end:
            if end.getsockopt(socket.SOL_SOCKET, socket.SO_PROTOCOL) != socket.IPPROTO_TCP:
                continue
            own, port = end.getsockname()[:2]
            is_here = any((host, port) in here for host in (own, "0.0.0.0", "::"))
            if is_here or end.getpeername()[:2] in there:
                os.close(int(name))
