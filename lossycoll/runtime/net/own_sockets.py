"""This process's TCP sockets, whoever opened them: libraries don't tell which are theirs."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection, Iterator

Address = tuple[str, int]
"""Numeric address and port."""
Ends = tuple[Address, Address]
"""This end of a connection, and the other."""


@contextlib.contextmanager
def borrow(fd: int) -> Iterator[socket.socket]:
    """The socket behind a descriptor that somebody else continues to own.

    Raises:
        OSError: It is no socket, or gone.
    """
    copy = os.dup(fd)
    try:
        end = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with end:
        yield end


def connections() -> dict[int, Ends]:
    """Both ends of each connected TCP socket, by file descriptor."""
    return {fd: ends for fd, end in _sockets() if (ends := _ends(end)) is not None}


def listeners() -> set[Address]:
    """Where TCP sockets listen."""
    return {
        end.getsockname()[:2]
        for _, end in _sockets()
        if _is_tcp(end) and end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def shut(addresses: Collection[Address]) -> None:
    """Shuts each connection down that has one of ``addresses`` at either end.

    Whoever owns it keeps the descriptor, and finds the connection at its end.
    """
    for _, end in _sockets():
        ends = _ends(end)
        if ends is not None and (ends[0] in addresses or ends[1] in addresses):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Each socket, borrowed: it stays what it is, though its number may be another's by now."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # gone
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with borrow(int(name)) as end:
                    yield int(name), end


def _is_tcp(end: socket.socket) -> bool:
    return end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM


def _ends(end: socket.socket) -> Ends | None:
    """Both addresses of a connected TCP socket; None for one of another kind, or a listener."""
    if not _is_tcp(end):
        return None
    try:
        return end.getsockname()[:2], end.getpeername()[:2]
    except OSError:
        return None
