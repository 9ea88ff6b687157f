"""Capacity of a socket's receive buffer, and so how large a group's packets may be.

The kernel charges a datagram more than its bytes, and all peers of a rank share its buffer. With
large packets, many ranks and a small buffer not even one packet per peer fits; smaller ones do.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Final

from lossycoll.runtime.engine.payload import HEADER_BYTES

SO_RCVBUFFORCE: Final = 33
WISH_BYTES: Final = 32 << 20
"""BUFFER_WISH of native/link_udp.c."""
CONTROL_CHARGE: Final = 9 * 832
"""CONTROL_CHARGE of native/link_udp.c: what is left of the buffer for each peer's control."""
WANTED_PER_PEER: Final = 2
"""Packets of each peer that fit at once: with one a sender waits out every round trip."""
PAYLOADS: Final = (7616, 3520, 1472)
"""The largest multiples of 64 whose charge is 8.5, 4.5 and 2.5 KiB."""
LEAST_PAYLOAD: Final = 448
"""Its charge is 1.5 KiB, of which anything smaller saves little."""


def receive_buffer(socket_buffer: int, ip_version: int) -> int:
    """Bytes that the engine's socket will get for the option ``socket_buffer``."""
    family = socket.AF_INET6 if ip_version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        wish = socket_buffer or WISH_BYTES
        with contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, wish)
        if not socket_buffer:  # for those who may go above net.core.rmem_max
            with contextlib.suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, wish)
        return probe.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


def packets_per_peer(payload: int, buffer: int, world: int) -> int:
    """Packets of each peer that ``buffer`` bytes hold at once; as credits of native/link_udp.c."""
    peers = max(1, world - 1)
    usable = buffer - buffer // 4  # the rest may be charged for what was read already
    control = min(usable // 2, peers * CONTROL_CHARGE)
    charge = (1 << (payload + HEADER_BYTES + 512 - 1).bit_length()) + 512
    return (usable - control) // charge // peers


def fitting_payload(largest: int, buffer: int, world: int) -> int:
    """The payload, at most ``largest``, for which ``buffer`` holds enough packets of each peer. Two
    where that takes no less than 1472 bytes, else one; the least if not even that will do."""
    usual = [largest, *(payload for payload in PAYLOADS if payload < largest)]
    for wanted in (WANTED_PER_PEER, 1):
        for payload in usual:
            if packets_per_peer(payload, buffer, world) >= wanted:
                return payload
    return min(largest, LEAST_PAYLOAD)
