"""Two engines on loopback, while somebody invents routers' messages about their sockets: that the
other end is gone, or that packets are too large. In a network of its own: the kernel believes some.

python -m tests.support.forged_icmp sealed|clear
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
SMALL_MTU = 68
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


def throw(raw: socket.socket, ports: list[int], stop: threading.Event, thrown: list[int]) -> None:
    while not stop.wait(0.0005):
        for kind in KINDS:
            for sender, receiver in (ports, ports[::-1]):
                with contextlib.suppress(BlockingIOError):
                    raw.sendto(message(kind, sender, receiver), ("127.0.0.1", 0))
                    thrown[0] += 1


def received() -> dict[str, int]:
    """What the kernel counted of such messages."""
    lines = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines()]
    names, values = [line[1:] for line in lines if line[0] == "Icmp:"]
    return dict(zip(names, map(int, values), strict=True))


def main(kind: type[Network]) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    thrown, stop = [0], threading.Event()
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    with raw, kind(2, PAYLOAD) as network:
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
    counted = received()
    assert counted["InMsgs"] >= thrown[0], counted
    assert counted["InCsumErrors"] == counted["InErrors"] == 0, counted
    route = subprocess.run(
        ["ip", "route", "get", "127.0.0.1"], capture_output=True, text=True, check=True
    )
    assert "mtu" in route.stdout, "the kernel didn't believe what was said of packet sizes"


if __name__ == "__main__":
    main({"sealed": SealedNetwork, "clear": Network}[sys.argv[1]])
