"""A rank that doesn't hear others, or not all that they say: the kernel drops their UDP before its
socket, as a firewall would, and nothing else."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Sequence

SO_ATTACH_FILTER = 26
LOAD_WORD, LOAD_HALF, LOAD_BYTE, JUMP_EQUAL, JUMP_FROM, RETURN = 0x20, 0x28, 0x30, 0x15, 0x35, 6
SOURCE_PORT = 0
"""Where it lies in what the filter sees, which begins with the header of UDP."""
TYPE, CONTROL = 8 + 3, 2
"""Place of a packet's type (native/wire.h) behind the header of UDP, and the type of control."""
CHANCE = (1 << 32) - 0x1000 + 56
"""Where it finds a number of 32 bits, another one each time."""


def _udp_sockets() -> list[socket.socket]:
    out = []
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = os.dup(int(name))
        except OSError:
            continue
        try:
            found = socket.socket(fileno=fd)
        except OSError:
            os.close(fd)
            continue
        is_udp = found.family == socket.AF_INET and found.type == socket.SOCK_DGRAM
        if is_udp and found.getsockname()[1]:
            out.append(found)
        else:
            found.close()
    return out


def drop_from(ports: Sequence[int]) -> int:
    """Drop all datagrams that come from one of ``ports``; of none, hear all again.

    Returns:
        How many sockets of this process that concerns.
    """
    lines = [(LOAD_HALF, 0, 0, SOURCE_PORT)]
    for i, port in enumerate(ports):
        lines.append((JUMP_EQUAL, len(ports) - i, 0, port))
    return _attach([*lines, (RETURN, 0, 0, 1 << 16), (RETURN, 0, 0, 0)])


def drop_data() -> int:
    """Drop all packets that come but for control; returns the same."""
    lines = [(LOAD_BYTE, 0, 0, TYPE), (JUMP_EQUAL, 1, 0, CONTROL)]
    return _attach([*lines, (RETURN, 0, 0, 0), (RETURN, 0, 0, 1 << 16)])


def drop_share(share: float) -> int:
    """Drop this share of all datagrams that come, by chance; returns the same."""
    least = round(share * (1 << 32))
    lines = [(LOAD_WORD, 0, 0, CHANCE), (JUMP_FROM, 1, 0, least)]
    return _attach([*lines, (RETURN, 0, 0, 0), (RETURN, 0, 0, 1 << 16)])


def _attach(lines: Sequence[tuple[int, int, int, int]]) -> int:
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    sockets = _udp_sockets()
    for one in sockets:
        with one:
            filter_of = struct.pack("HP", len(lines), ctypes.addressof(program))
            one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, filter_of)
    return len(sockets)
