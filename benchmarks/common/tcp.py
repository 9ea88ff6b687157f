"""This process's TCP connections, which libraries made, and their congestion control."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Container, Iterator
from pathlib import Path

Address = tuple[str, int]
"""Numeric address and port."""
Ends = tuple[Address, Address]
"""This end of a connection, and the other."""
CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
DEFAULT = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def controls() -> list[str]:
    """Those that this kernel has."""
    return CONTROLS.read_text().split()


def allowed() -> list[str]:
    """Those that a host of the laboratory may have as its default."""
    return ALLOWED.read_text().split()


def use_by_default(control: str) -> None:
    """Sets it for all connections that this host makes from now on, whichever process does."""
    DEFAULT.write_text(control)


def use(control: str, but: Container[int] = ()) -> int:
    """Sets it on this process's connections, but for those of these numbers; returns how many."""
    chosen = [number for number in connections() if number not in but]
    for number in chosen:
        with borrow(number) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    return len(chosen)


@contextlib.contextmanager
def borrow(fd: int) -> Iterator[socket.socket]:
    """The socket behind a descriptor that somebody else continues to own."""
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


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    """Each socket, borrowed: it stays what it is, though its number may be another's by now."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # gone
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with borrow(int(name)) as end:
                    yield int(name), end


def _ends(end: socket.socket) -> Ends | None:
    """Both addresses of a connected TCP socket; None for one of another kind, or a listener."""
    if end.family not in (socket.AF_INET, socket.AF_INET6) or end.type != socket.SOCK_STREAM:
        return None
    try:
        return end.getsockname()[:2], end.getpeername()[:2]
    except OSError:
        return None
