"""Roles with a process of their own: the switch, and the ends of a probe (native/lab/lab.h).

``process.py EXTENSION ROLE ARGUMENT...``: a role is a function below, and takes these arguments. A
script that is run by its path, so that it imports the extension and nothing else of the package.
What listens says "ready" when it does, and so do pings and source, which end when stdin does;
results go to stdout as JSON.
"""

import contextlib
import importlib.util
import json
import os
import select
import socket
import struct
import sys
import time
from typing import Any

PING_SECONDS = 2.0
SINK_SECONDS = 1.0
CHUNK_BYTES = 1 << 16
CYCLE_S = 1.0
"""In each of these a source sends for its share of it, and is silent for the rest."""
TCP_INFO_RESENT = 100
"""Offset of tcpi_total_retrans in Linux's tcp_info."""


def switch(lab: Any, memory: str, lifeline: str, _: str) -> None:
    if lab.lib.lab_switch(int(memory), int(lifeline)):
        sys.exit(1)


def receive(lab: Any, port: str, count: str, idle_ms: str) -> None:
    """Wait until all are there or, once stdin ends, none has come for ``idle_ms``."""
    counts = lab.ffi.new("lab_probe_counts *")
    if lab.lib.lab_probe_receive(int(port), int(count), int(idle_ms), 1, 0, counts):
        sys.exit(f"cannot receive: {os.strerror(lab.ffi.errno)}")
    names = [name for name, _ in lab.ffi.typeof("lab_probe_counts").fields]
    print(json.dumps({name: getattr(counts, name) for name in names}))


def send(lab: Any, address: str, *rest: str) -> None:
    """REST: port, count, bytes, segments, bytes per second."""
    start = time.monotonic()
    if lab.lib.lab_probe_send(address.encode(), *map(int, rest[:4]), float(rest[4])):
        sys.exit(f"cannot send: {os.strerror(lab.ffi.errno)}")
    print(json.dumps({"start": start}))


def echo(_: Any, port: str) -> None:
    """Sends back what comes, until it is ended."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.bind(("", int(port)))
        print("ready", flush=True)
        while True:
            here.sendto(*here.recvfrom(2048))


def ping(_: Any, address: str, port: str, count: str) -> None:
    """Round trips one after the other; the times in ms of those that came back."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.connect((address, int(port)))
        times = [time for n in range(int(count)) if (time := _round_trip(here, n)) is not None]
    print(json.dumps({"ms": times}))


def _round_trip(here: socket.socket, number: int) -> float | None:
    """In ms; None if no answer came."""
    question = str(number).encode()
    start = time.monotonic()
    here.send(question)
    here.settimeout(PING_SECONDS)
    try:
        # An answer to an earlier question that was given up is no answer.
        while here.recv(2048) != question:
            pass
    except OSError:
        return None
    return (time.monotonic() - start) * 1e3


def pings(_: Any, address: str, port: str, interval_ms: str) -> None:
    """Round trips until stdin ends; the times in ms of those that came back."""
    times: list[float | None] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.connect((address, int(port)))
        print("ready", flush=True)
        while not select.select([sys.stdin], [], [], int(interval_ms) / 1e3)[0]:
            times.append(_round_trip(here, len(times)))
    print(json.dumps({"ms": [time for time in times if time is not None]}))


def sink(_: Any, port: str) -> None:
    """Takes what one flow sends, until its connection ends, or stdin does and there is none."""
    count = 0
    with socket.create_server(("", int(port))) as here:
        print("ready", flush=True)
        if here in select.select([here, sys.stdin], [], [])[0]:
            connection, _ = here.accept()
            room = memoryview(bytearray(CHUNK_BYTES))
            with contextlib.suppress(OSError):  # the source ends by a reset, which may get lost
                while connection in select.select([connection, sys.stdin], [], [])[0]:
                    got = connection.recv_into(room)
                    count += got
                    if not got:
                        break
                connection.settimeout(SINK_SECONDS)
                while got := connection.recv_into(room):
                    count += got
    print(json.dumps({"bytes": count}))


def source(_: Any, address: str, port: str, congestion: str, share: str) -> None:
    """Sends until stdin ends. The status is errno when there is no such congestion control."""
    on_s = float(share) * CYCLE_S
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as here:
        try:
            here.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        except OSError as error:
            sys.exit(error.errno)
        # Or it would send on what is queued when it is to be silent.
        here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, CHUNK_BYTES)
        print("ready", flush=True)
        start = time.monotonic()
        here.setblocking(False)
        here.connect_ex((address, int(port)))
        data = bytes(CHUNK_BYTES)
        while True:
            phase = (time.monotonic() - start) % CYCLE_S
            on = phase < on_s
            left = (on_s if on else CYCLE_S) - phase
            ended, ready, _ = select.select([sys.stdin], [here] if on else [], [], left)
            if ended:
                break
            if not ready:
                continue
            try:
                here.send(data)
            except BlockingIOError:
                pass
            except OSError:
                time.sleep(0.1)  # the network lost each try to connect, or the receiver is gone
                if select.select([sys.stdin], [], [], 0)[0]:
                    break
        seconds = time.monotonic() - start
        info = here.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_RESENT + 4)
        (resent,) = struct.unpack_from("=I", info, TCP_INFO_RESENT)
        # What is queued is thrown away: the job has ended.
        here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    print(json.dumps({"seconds": seconds, "resent": resent}))


def main(path: str, role: str, *arguments: str) -> None:
    spec = importlib.util.spec_from_file_location("_lab", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    globals()[role](module, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
