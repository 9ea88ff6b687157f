"""What runs in a process of its own: the switch, and the two ends of a probe (native/lab/lab.h).

    process.py EXTENSION switch MEMORY LIFELINE READY
    process.py EXTENSION receive PORT COUNT IDLE_MS
    process.py EXTENSION send ADDRESS PORT COUNT BYTES SEGMENTS BYTES_PER_S
    process.py EXTENSION echo PORT
    process.py EXTENSION ping ADDRESS PORT COUNT

A script that is run by its path, so that it imports the extension and nothing else of the package.
What listens says "ready" when it does; results go to stdout as JSON.
"""

import importlib.util
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

PING_SECONDS = 2.0


def switch(lab: Any, memory: str, lifeline: str, ready: str) -> None:
    if lab.lib.lab_switch(int(memory), int(lifeline), int(ready)):
        sys.exit(1)


def receive(lab: Any, port: str, count: str, idle_ms: str) -> None:
    """Until all are there or, once stdin ends, none has come for ``idle_ms``."""
    counts = lab.ffi.new("lab_probe_counts *")
    if lab.lib.lab_probe_receive(int(port), int(count), int(idle_ms), 1, 0, counts):
        sys.exit(f"cannot receive: {os.strerror(lab.ffi.errno)}")
    names = [name for name, _ in lab.ffi.typeof("lab_probe_counts").fields]
    print(json.dumps({name: getattr(counts, name) for name in names}))


def send(lab: Any, address: str, port: str, *rest: str) -> None:
    count, size, segments = map(int, rest[:3])
    start = time.monotonic()
    to = address.encode()
    if lab.lib.lab_probe_send(to, int(port), count, size, segments, float(rest[3])):
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
    times = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.connect((address, int(port)))
        for number in range(int(count)):
            question = str(number).encode()
            start = time.monotonic()
            here.send(question)
            here.settimeout(PING_SECONDS)
            try:
                # An answer to an earlier question that was given up is no answer.
                while here.recv(2048) != question:
                    pass
            except OSError:
                continue
            times.append((time.monotonic() - start) * 1e3)
    print(json.dumps({"ms": times}))


def main(path: str, role: str, *arguments: str) -> None:
    spec = importlib.util.spec_from_file_location("_lab", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    roles: dict[str, Callable[..., None]] = {
        "switch": switch,
        "receive": receive,
        "send": send,
        "echo": echo,
        "ping": ping,
    }
    roles[role](module, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
