"""Self-tests over the loopback interface: do packets arrive, and how fast."""

from __future__ import annotations

import socket
import time

SECONDS = 0.3
DATAGRAM = 8192


def udp_loopback() -> str:
    """One datagram at a time, there and read at once: the bare sockets, without the engine."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(1.0)
        sender.connect(receiver.getsockname())
        payload = bytes(range(256)) * (DATAGRAM // 256)
        count = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < SECONDS:
            sender.send(payload)
            if receiver.recv(DATAGRAM + 1) != payload:
                raise RuntimeError(f"datagram {count} arrived with other contents")
            count += 1
    rate = count * DATAGRAM / elapsed / 1e9
    return f"{count} datagrams of {DATAGRAM} bytes, none lost, {rate:.2f} GB/s"


def engine_loopback() -> str:
    raise RuntimeError("engine not wired yet")
