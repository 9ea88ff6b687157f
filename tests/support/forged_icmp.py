"""Two engines on loopback, while somebody invents routers' messages about their sockets: that the
other end is gone, or that packets are too large. In a network of its own: the kernel believes some.

python -m tests.support.forged_icmp sealed|clear|six
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

from tests.support.network import Network
from tests.support.relay import PAYLOAD, assert_sums
from tests.support.sealed import SealedNetwork

HOST_GONE, PORT_GONE, TOO_LARGE, FORBIDDEN = (3, 1), (3, 3), (3, 4), (3, 13)
REDIRECT, EXCEEDED, QUENCH = (5, 1), (11, 0), (4, 0)
KINDS = [HOST_GONE, PORT_GONE, TOO_LARGE, FORBIDDEN, REDIRECT, EXCEEDED, QUENCH]
TOO_LARGE_6 = (2, 0)
KINDS_6 = [(1, 3), (1, 4), TOO_LARGE_6, (1, 1), (3, 0), (4, 0)]
"""Of IPv6: host and port gone, too large, forbidden, time exceeded, a header that isn't known."""
SMALL_MTU, SMALL_MTU_6 = 68, 1280
LEAST_THROWN = 1000


def checksum(data: bytes) -> int:
    """RFC 1071."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def message(kind: tuple[int, int], sender: int, receiver: int) -> bytes:
    """What a router would say of a datagram between two ports of 127.0.0.1."""
    here = socket.inet_aton("127.0.0.1")
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 1436, 1, 0, 64, socket.IPPROTO_UDP, 0, here, here)
    udp = struct.pack("!HHHH", sender, receiver, 1416, 0)
    rest = struct.pack("!HH", 0, SMALL_MTU) if kind == TOO_LARGE else here
    body = rest + ip + udp
    head = struct.pack("!BBH", *kind, 0)
    return head[:2] + struct.pack("!H", checksum(head + body)) + body


def message_6(kind: tuple[int, int], sender: int, receiver: int) -> bytes:
    """The same of IPv6; the kernel writes the checksum."""
    here = socket.inet_pton(socket.AF_INET6, "::1")
    ip = struct.pack("!IHBB16s16s", 6 << 28, 1416, socket.IPPROTO_UDP, 64, here, here)
    udp = struct.pack("!HHHH", sender, receiver, 1416, 0)
    return struct.pack("!BBHI", *kind, 0, SMALL_MTU_6 * (kind == TOO_LARGE_6)) + ip + udp


def throw(raw: socket.socket, ports: list[int], stop: threading.Event, thrown: list[int]) -> None:
    six = raw.family == socket.AF_INET6
    kinds, made, here = (KINDS_6, message_6, "::1") if six else (KINDS, message, "127.0.0.1")
    while not stop.wait(0.0005):
        for kind in kinds:
            for sender, receiver in (ports, ports[::-1]):
                with contextlib.suppress(BlockingIOError):
                    raw.sendto(made(kind, sender, receiver), (here, 0))
                    thrown[0] += 1


def received(six: bool) -> dict[str, int]:
    """What the kernel counted of such messages."""
    if six:
        words = [line.split() for line in Path("/proc/net/snmp6").read_text().splitlines()]
        return {name.removeprefix("Icmp6"): int(value) for name, value in words}
    lines = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines()]
    names, values = [line[1:] for line in lines if line[0] == "Icmp:"]
    return dict(zip(names, map(int, values), strict=True))


def main(kind: type[Network], six: bool) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    thrown, stop = [0], threading.Event()
    here = "::1" if six else "127.0.0.1"
    if six:
        raw = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
    else:
        raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    with raw, kind(2, PAYLOAD, lambda rank: here) as network:
        ports = [host.link().port for host in network.hosts]
        thread = threading.Thread(target=throw, args=(raw, ports, stop, thrown))
        thread.start()
        try:
            while thrown[0] < LEAST_THROWN:
                assert_sums(network, 5000, 4, reliable=True)
        finally:
            stop.set()
            thread.join()
        for engine in network.engines:
            stats = engine.stats()
            assert stats.packets_missing == stats.packets_resent == 0, stats
            assert stats.send_failures == stats.fast_path_refusals == 0, stats
    counted = received(six)
    assert counted["InMsgs"] >= thrown[0], counted
    assert counted["InCsumErrors"] == counted["InErrors"] == 0, counted
    route = subprocess.run(["ip", "route", "get", here], capture_output=True, text=True, check=True)
    assert "mtu" in route.stdout, "the kernel didn't believe what was said of packet sizes"


if __name__ == "__main__":
    main(SealedNetwork if sys.argv[1] == "sealed" else Network, sys.argv[1] == "six")
