"""One TCP flow: ``python -m benchmarks.studies.fairness.flow receive PORT OUT``, ``... send PORT
CONFIG``.

CONFIG is JSON: address, congestion control, seconds. OUT gets (time, bytes received so far).
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

Samples = list[tuple[float, int]]
"""Time by the clock that all hosts of a laboratory share, and bytes received so far."""


def receive(port: int, out: Path) -> None:
    samples: Samples = []
    total = 0
    with socket.create_server(("", port)) as server:
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(1 << 16):
                total += len(data)
                now = time.monotonic()
                if not samples or now - samples[-1][0] > 0.1:
                    samples.append((now, total))
    out.write_text(json.dumps(samples))


def send(port: int, address: str, control: str, seconds: float) -> None:
    """Fills the link. Waits for up to 10 s for the receiver to listen."""
    begin = time.monotonic()
    while True:
        flow = socket.socket()
        flow.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        try:
            flow.connect((address, port))
            break
        except ConnectionRefusedError:
            flow.close()
            if time.monotonic() - begin > 10:
                raise
            time.sleep(0.05)
    with flow:
        begin = time.monotonic()
        while time.monotonic() - begin < seconds:
            flow.sendall(bytes(1 << 16))


def main() -> None:
    what, port, rest = sys.argv[1:]
    if what == "receive":
        receive(int(port), Path(rest))
    else:
        send(int(port), **json.loads(rest))


if __name__ == "__main__":
    main()
