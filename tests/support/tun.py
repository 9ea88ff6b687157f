"""A network device whose packets this process carries, and IPv4 packets whose addresses change."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import subprocess

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CHECKSUM_AT = {socket.IPPROTO_TCP: 16, socket.IPPROTO_UDP: 6}
"""Where each protocol's checksum is, behind the header of IP."""
Address = tuple[str, int]


def device(name: str, address: str, *routes: str) -> int:
    """Makes a device with an address, and routes by it. Returns the descriptor of its packets."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    subprocess.run(["ip", "address", "add", address, "dev", name], check=True)
    for device in ("lo", name):
        subprocess.run(["ip", "link", "set", device, "up"], check=True)
    for route in routes:
        subprocess.run(["ip", "route", "add", route, "dev", name], check=True)
    return fd


def ends(packet: bytes) -> tuple[int, Address, Address] | None:
    """Protocol, source and destination; None: it has no ports, or is of another kind."""
    if len(packet) < 28 or packet[0] >> 4 != 4 or packet[9] not in CHECKSUM_AT:
        return None
    head = 4 * (packet[0] & 15)
    ports = struct.unpack_from("!HH", packet, head)
    addresses = socket.inet_ntoa(packet[12:16]), socket.inet_ntoa(packet[16:20])
    return packet[9], (addresses[0], ports[0]), (addresses[1], ports[1])


def changed(packet: bytes, source: Address, to: Address) -> bytes:
    """The packet with other ends, and checksums that fit."""
    out, head = bytearray(packet), 4 * (packet[0] & 15)
    out[12:20] = socket.inet_aton(source[0]) + socket.inet_aton(to[0])
    struct.pack_into("!HH", out, head, source[1], to[1])
    struct.pack_into("!H", out, 10, 0)
    struct.pack_into("!H", out, 10, 0xFFFF - _sum(out[:head]))
    at = head + CHECKSUM_AT[packet[9]]
    (before,) = struct.unpack_from("!H", out, at)
    if before or packet[9] == socket.IPPROTO_TCP:  # RFC 1624, equation 3
        old = b"".join((packet[12:20], packet[head : head + 4]))
        new = b"".join((out[12:20], out[head : head + 4]))
        words = struct.pack("!H", before ^ 0xFFFF) + bytes(one ^ 0xFF for one in old) + new
        struct.pack_into("!H", out, at, _sum(words) ^ 0xFFFF or 0xFFFF)
    return bytes(out)


def _sum(data: bytes | bytearray) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
