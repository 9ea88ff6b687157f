"""Peers of a swarm as processes that print lines of JSON, for several benchmarks.

Each line has a ``kind``, the ``time``, and with a round its number, ``members`` and ``failure``.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks.common.results import ROOT

MOST_SECONDS: Final = 900.0


class Peer:
    """A process, and the lines that it has printed."""

    def __init__(self, command: Sequence[str], environ: dict[str, str]) -> None:
        self.lines: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        works = self._read, lambda: self.errors.extend(self._process.stderr or ())
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    @classmethod
    def of_module(
        cls,
        module: str,
        config: dict[str, Any],
        environ: dict[str, str],
        python: str = sys.executable,
    ) -> Peer:
        """A module of this package, with its configuration."""
        return cls([python, "-m", f"benchmarks.micro.{module}", json.dumps(config)], environ)

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.lines.append(json.loads(line))

    def said(self, kind: str) -> list[dict[str, Any]]:
        """Lines of a kind, in order."""
        return [line for line in list(self.lines) if line["kind"] == kind]

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def signal(self) -> None:
        """SIGKILL, without a wait for the end."""
        if not self.has_ended:
            self._process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.signal()
        self._process.wait()
        for thread in self._threads:
            thread.join(10)


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def wait_for(peers: Sequence[Peer], done: Callable[[], Any]) -> Any:
    """What ``done`` returns, as soon as that is true. SystemExit: a peer has ended, or it isn't
    true in time."""
    end = time.monotonic() + MOST_SECONDS
    while not (found := done()):
        ended = [peer for peer in peers if peer.has_ended]
        if ended or time.monotonic() > end:
            tails = ["".join(peer.errors)[-1500:] for peer in ended or peers[:1]]
            last = [peer.lines[-1:] for peer in peers]
            raise SystemExit(f"{len(ended)} peers ended: {tails}; the last of each: {last}")
        time.sleep(0.05)
    return found


def common_round(peers: Sequence[Peer]) -> list[dict[str, Any]]:
    """What each peer says of the first round of all; nothing: there was none yet."""
    found: dict[int, list[dict[str, Any]]] = {}
    for peer in peers:
        for line in peer.said("round"):
            if line["members"] == len(peers) and not line["failure"]:
                found.setdefault(line["round"], []).append(line)
    whole_ones = [number for number, lines in found.items() if len(lines) == len(peers)]
    return found[min(whole_ones)] if whole_ones else []
