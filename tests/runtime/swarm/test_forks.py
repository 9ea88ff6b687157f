"""Ports of a peer that was killed while a child lives that it has forked: a DataLoader's, say."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from lossycoll import Swarm
from lossycoll.options.fields import Options
from lossycoll.runtime.swarm.server import bound_to
from tests.support.transports import HERE

SECRET = "a secret of tests"
KILLED = """
import os, sys
from lossycoll import Swarm

lives = int(sys.argv[1])
with Swarm("127.0.0.1:0", secret=sys.argv[2], name="a") as first:
    with Swarm(join=[first.address], secret=sys.argv[2], name="b") as second:
        engines = [one.member._endpoint.place[1] for one in (first, second)]
        directories = int(first.address.rpartition(":")[2]), second._reserved.port
        if os.fork() == 0:
            os.read(lives, 1)  # until the test is over
            os._exit(0)
        first.wait_for(2)
        print(*engines, *directories, flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Of two engines and two directories; their owner has been killed, and its child lives."""
    lives, ends = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(lives), SECRET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[lives],
    )
    try:
        assert process.stdout is not None
        found = [int(one) for one in process.stdout.readline().split()]
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        yield found
    finally:
        os.close(ends)
        os.close(lives)
        process.kill()
        process.communicate(timeout=30)


def test_a_killed_peers_ports_are_free_though_its_child_lives(ports: list[int]) -> None:
    assert len(ports) == 4
    for port in ports[:2]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as engine:
            engine.bind((HERE, port))
    for port in ports[2:]:
        with closing(bound_to(HERE, port)):
            pass


def test_a_killed_listener_starts_again_though_its_child_lives(ports: list[int]) -> None:
    engine, _, directory, _ = ports
    options = Options(port_range=f"{engine}-{engine}")
    with Swarm(f"{HERE}:{directory}", secret=SECRET, name="a", options=options) as again:
        assert again.peers() == ("a",)
