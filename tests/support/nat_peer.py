"""A peer behind a translator: in a network of its own, whose packets another process carries.

python -m tests.support.nat_peer SOCKET NAME OWN KEEP SECRET: sends the descriptor of its device by
the socket, joins the directory, and averages once for each line that it reads; a line of JSON for
each round.
"""

from __future__ import annotations

import json
import socket
import sys

import numpy as np

from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.swarm.member import SwarmMember
from tests.support.tun import device

DIRECTORY = ("198.51.100.1", 7000)
LOCAL = "192.168.0.2"
VALUES = 20_000


def main(fd: int, name: str, own: float, keep: float, secret: str) -> None:
    tun = device("t0", f"{LOCAL}/24", "default")
    with socket.socket(fileno=fd) as end:
        socket.send_fds(end, [b"t"], [tun])
    found = Secret.of(secret.encode()) if secret else None
    member = SwarmMember([DIRECTORY], name=name, secret=found, keepalive=keep)
    member.averages("5c" * 16)
    print(json.dumps({"number": member.number, "address": member.address}), flush=True)
    for line in sys.stdin:
        values = np.full(VALUES, own, np.float32)
        report = member.average(values, 1.0, float(line))
        said = {
            "round": report.round,
            "members": report.members,
            "missing": report.missing,
            "failure": report.failure,
            "least": float(values.min()),
            "most": float(values.max()),
            "seconds": report.seconds,
        }
        print(json.dumps(said), flush=True)
    member.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
