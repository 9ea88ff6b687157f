"""A swarm of processes on hosts of two sites; the network between them is cut, and made whole."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from lossycoll.lab import Lab, Network
from tests.support.lab_kit import ROOT, needs_lab
from tests.support.waiting import until

OWN = (1.0, 2.0, 4.0, 8.0)
PORT = 7000
pytestmark = [needs_lab, pytest.mark.long]


class Peer:
    """On a host; the first one alone listens."""

    def __init__(self, lab: Lab, host: int, **config: Any) -> None:
        told = {"name": f"host {host}", "own": OWN[host], **config}
        self.lines: list[dict[str, Any]] = []
        self.process = lab.start(
            host,
            [sys.executable, "-m", "tests.support.split_peer", json.dumps(told)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(json.loads(line))

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [one for one in list(self.lines) if one.get("round", -1) >= 0]

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        self._thread.join(10)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def start(lab: Lab, stack: ExitStack) -> list[Peer]:
    place = f"{Lab.address(0)}:{PORT}"
    first = Peer(lab, 0, listen=place)
    until(lambda: first.lines, seconds=60)
    peers = [first, *(Peer(lab, host, join=[place]) for host in (1, 2, 3))]
    for peer in peers:
        stack.callback(peer.process.kill)
    meet(peers, range(4), seconds=60)
    return peers


def meet(peers: Sequence[Peer], hosts: Sequence[int], seconds: float) -> None:
    """Returns when each of these hosts has had a new round of just them, and its mean."""
    begin = [len(peer.rounds) for peer in peers]
    wanted = np.mean([np.full(1, OWN[host], np.float32) for host in hosts], axis=0)[0]

    def have() -> bool:
        return all(
            any(
                len(one["members"]) == len(hosts) == one["contributions"]
                and one["least"] == one["most"] == wanted
                for one in peers[host].rounds[begin[host] :]
            )
            for host in hosts
        )

    until(have, f"a round of hosts {list(hosts)}", seconds=seconds)


def check(peers: Sequence[Peer]) -> None:
    """All end as they should, no round has had anybody twice, and none has gone back."""
    for peer in peers:
        peer.end()
        assert peer.process.returncode == 0
        numbers = [one["round"] for one in peer.rounds]
        assert numbers == sorted(set(numbers))
        assert all(1.0 <= one["least"] <= one["most"] <= 8.0 for one in peer.rounds)
        assert not peer.rounds[-1]["failure"] or len(peer.rounds[-1]["members"]) > 1


def test_a_split_network_heals(stack: ExitStack) -> None:
    """The part without a directory elects one; values of each part are the means of its own."""
    lab = stack.enter_context(Lab(Network(sites=2, hosts=2)))
    peers = start(lab, stack)
    lab.change_wan(loss=1.0)
    meet(peers, (0, 1), seconds=60)
    meet(peers, (2, 3), seconds=60)
    lab.change_wan(loss=0.0)
    meet(peers, range(4), seconds=60)
    meet(peers, range(4), seconds=30)
    check(peers)


def test_splits_that_come_and_go(stack: ExitStack) -> None:
    """Shorter than a lease, about as long, and longer."""
    lab = stack.enter_context(Lab(Network(sites=2, hosts=2)))
    peers = start(lab, stack)
    for cut, whole in ((3.0, 3.0), (11.0, 2.0), (16.0, 8.0), (14.0, 0.5), (2.0, 1.0)):
        for loss, seconds in ((1.0, cut), (0.0, whole)):
            lab.change_wan(loss=loss)
            threading.Event().wait(seconds)
    assert any(len(one["members"]) == 2 for one in peers[0].rounds)
    meet(peers, range(4), seconds=90)
    check(peers)
