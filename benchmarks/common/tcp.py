"""TCP's congestion control of connections that a library made."""

from __future__ import annotations

import socket
from collections.abc import Container
from pathlib import Path

from lossycoll.runtime.net.own_sockets import borrow, connections

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
