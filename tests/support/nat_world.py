"""Peers behind translators, with real engines: python -m tests.support.nat_world SCENARIO SECRET

In a network namespace of its own. Each peer has one, too, of which every packet comes through this
process: it translates addresses (nat.py), and hands the packet to another peer or to the directory,
which is here. All peers have the same address of their own, as such peers often have.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from lossycoll.runtime.keys.secret import Secret
from lossycoll.runtime.swarm.server import DirectoryServer
from tests.support.nat import Nat
from tests.support.nat_peer import DIRECTORY, LOCAL
from tests.support.tun import changed, device, ends

UDP, TCP = socket.IPPROTO_UDP, socket.IPPROTO_TCP
NEW = ["unshare", "--net", sys.executable, "-m", "tests.support.nat_peer"]
PATIENCE = 20.0


class World:
    def __init__(self, secret: str) -> None:
        self.secret = secret
        self.fds = {-1: device("out0", f"{DIRECTORY[0]}/24")}
        self.nats: list[Nat] = []
        self.tcp: list[Nat] = []
        self.peers: list[subprocess.Popen[str]] = []
        self.numbers: list[int] = []
        found = Secret.of(secret.encode()) if secret else None
        self.server = DirectoryServer(*DIRECTORY, found, patience=PATIENCE)
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._carry)
        self.thread.start()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for peer in self.peers:
            assert peer.stdin is not None
            peer.stdin.close()
        for peer in self.peers:
            try:
                peer.wait(20)
            except subprocess.TimeoutExpired:
                peer.kill()
                peer.wait()
        self.server.close()
        self.stop.set()
        self.thread.join()
        for fd in self.fds.values():
            os.close(fd)

    def come(self, keep: float = 15.0, **how: Any) -> int:
        """A peer, behind a translator of this kind. Its value is 2 to the power of its number."""
        index = len(self.peers)
        address = f"198.51.100.{10 + index}"
        self.nats.append(Nat(address, time.monotonic, **how))
        self.tcp.append(Nat(address, time.monotonic))
        here, there = socket.socketpair()
        arguments = [str(there.fileno()), f"peer {index}", str(2.0**index), str(keep), self.secret]
        peer = subprocess.Popen(
            [*NEW, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[there.fileno()],
        )
        there.close()
        self.peers.append(peer)
        with here:
            _, fds, _, _ = socket.recv_fds(here, 1, 1)
        with self.lock:
            self.fds[index] = fds[0]
        said = self._heard(peer)
        assert said["address"] == LOCAL
        assert said["number"] == index  # they come one after another
        return index

    def round(self, timeout: float = 20.0) -> list[dict[str, Any]]:
        """One of all."""
        for peer in self.peers:
            assert peer.stdin is not None
            peer.stdin.write(f"{timeout}\n")
            peer.stdin.flush()
        return [self._heard(peer) for peer in self.peers]

    @staticmethod
    def _heard(peer: subprocess.Popen[str]) -> dict[str, Any]:
        assert peer.stdout is not None
        line = peer.stdout.readline()
        assert line, "a peer has ended"
        found: dict[str, Any] = json.loads(line)
        return found

    # ---- packets ----

    def _carry(self) -> None:
        while not self.stop.is_set():
            with self.lock:
                indices = {fd: index for index, fd in self.fds.items()}
            readable, _, _ = select.select(list(indices), [], [], 0.05)
            for fd in readable:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        self._pass(indices[fd], os.read(fd, 2048))

    def _pass(self, index: int, packet: bytes) -> None:
        found = ends(packet)
        if found is None:
            return
        protocol, source, to = found
        nats = self.nats if protocol == UDP else self.tcp
        if index >= 0:
            source = nats[index].out(source, to)
        receiver = next((i for i, nat in enumerate(nats) if nat.address == to[0]), -1)
        if receiver >= 0:
            inner = nats[receiver].into(to[1], source)
            if inner is None:
                return
            to = inner
        elif to[0] != DIRECTORY[0]:
            return  # to an address of their own, which leads nowhere from here
        with contextlib.suppress(BlockingIOError):
            os.write(self.fds[receiver], changed(packet, source, to))


def mean_of(numbers: Sequence[int]) -> float:
    """Exact in float32, if there are two or four."""
    return sum(2.0**number for number in numbers) / len(numbers)


def exact(reports: list[dict[str, Any]]) -> None:
    """All had the mean of all, to the bit."""
    mean = mean_of(range(len(reports)))
    for one in reports:
        assert (one["failure"], one["missing"]) == ("", []), reports
        assert (one["least"], one["most"]) == (mean, mean), reports


def cones(world: World) -> None:
    for _ in range(4):
        world.come()
    for _ in range(3):
        exact(world.round())
    for index, peer in world.server._directory.peers.items():
        assert peer.place is not None
        assert peer.place.host == LOCAL
        assert [host for host, _ in peer.place.others] == [world.nats[index].address]


def symmetric(world: World) -> None:
    """The first two don't reach each other, and all reach the others."""
    for kind in (True, True, False, False):
        world.come(symmetric=kind, open=not kind)
    first = world.round()
    assert [one["failure"] for one in first] == [""] * 4, first
    assert [one["missing"] for one in first] == [[1], [0], [], []], first
    assert all(one["seconds"] < 15 for one in first), first
    assert all(world.nats[index].filtered > 5 for index in (0, 1))
    together = set()
    for _ in range(3):
        reports = world.round()
        for index, one in enumerate(reports):
            assert not {0, 1} <= set(one["members"]), reports
            mean = mean_of(one["members"])
            assert (one["failure"], one["missing"]) == ("", []), reports
            assert one["least"] == one["most"] == mean, reports
            together |= {(index, other) for other in one["members"]}
    assert {(0, 2), (0, 3)} & together
    assert {(1, 2), (1, 3)} & together


def kept(world: World) -> None:
    """Mappings that last less than the pause between two rounds."""
    for _ in range(2):
        world.come(keep=0.3, life=1.5)
    exact(world.round())
    time.sleep(4.0)
    assert [nat.expired for nat in world.nats] == [0, 0]
    exact(world.round())


def expired(world: World) -> None:
    """The same where nobody keeps them."""
    for _ in range(2):
        world.come(keep=60.0, life=1.5)
    exact(world.round())
    time.sleep(4.0)
    reports = world.round(6.0)
    assert min(nat.expired for nat in world.nats) > 0
    assert sum(nat.filtered + nat.unknown for nat in world.nats) > 0
    assert all(one["seconds"] < 20 for one in reports)
    assert not all(one["least"] == one["most"] == 1.5 for one in reports)


def restarted(world: World) -> None:
    """A translator that forgets: the peer is seen at another port, comes anew, and is met there."""
    for _ in range(2):
        world.come(keep=0.4)
    exact(world.round())
    directory = world.server._directory
    before = directory.peers[0].incarnation
    world.nats[0].restart()
    end = time.monotonic() + 20
    while 0 not in directory.peers or directory.peers[0].incarnation == before:
        assert time.monotonic() < end
        time.sleep(0.05)
    exact(world.round())


SCENARIOS: dict[str, Callable[[World], None]] = {
    one.__name__: one for one in (cones, symmetric, kept, expired, restarted)
}

if __name__ == "__main__":
    with World(sys.argv[2] if len(sys.argv) > 2 else "") as made:
        SCENARIOS[sys.argv[1]](made)
