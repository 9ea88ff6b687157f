"""Flows of TCP between hosts while a job runs, and round trips beside them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from ..errors import LabError
from ..options.ranges import is_real
from .job import Hosts, end
from .network import Network, check_congestion, check_whole, wrong
from .spawn import own_process

PORT: Final = 29100
"""Port of the first flow; the others' follow it. The port before it is that of the round trips."""
FLOWS_MAX: Final = 64
PING_MS: Final = 10
START_SECONDS: Final = 20.0
END_SECONDS: Final = 30.0
SETTINGS: Final = Path("/proc/sys/net/ipv4")


@dataclass(frozen=True)
class Flows:
    """Flows that send as much as their congestion control lets them."""

    congestion: str  # its name, as in "cubic"
    count: int = 1  # how many flows
    # (sender, receiver); None: the first flow is from host 0 to host 1, the second from host 1 to
    # host 2, and so on, round and round
    pair: tuple[int, int] | None = None
    share: float = 1.0  # of the time in which they send, all at once, in each second

    def __post_init__(self) -> None:
        check_congestion(self.congestion)
        check_whole("TCP flows", self.count, 1, FLOWS_MAX)
        if not is_real(self.share, 0.001, 1):
            raise wrong("TCP flows' share of the time", self.share, "0.001 to 1")


@dataclass(frozen=True)
class FlowTook:
    """One flow at its end: what its receiver has, and what its sender had to send again."""

    congestion: str
    pair: tuple[int, int]
    seconds: float
    bytes: int
    resent: int

    @property
    def mbit(self) -> float:
        return self.bytes * 8e-6 / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Took:
    """All flows, and the times in ms of round trips of small packets from host 0 to host 1."""

    flows: tuple[FlowTook, ...]
    round_trips: tuple[float, ...]

    def percentile(self, share: float) -> float:
        """The time below which a share of the round trips is; NaN if none came back."""
        times = sorted(self.round_trips)
        return times[min(len(times) - 1, int(share * len(times)))] if times else math.nan

    @property
    def tail_ratio(self) -> float:
        """P99/P50 of the round trips."""
        return self.percentile(0.99) / self.percentile(0.5) if self.round_trips else math.nan


def placed(wanted: Sequence[Flows], network: Network) -> list[tuple[Flows, tuple[int, int]]]:
    """Each flow's kind and its (sender, receiver). OptionError for no such host."""
    out: list[tuple[Flows, tuple[int, int]]] = []
    for one in wanted:
        if one.pair is not None:
            network.check_link(*one.pair)
        for _ in range(one.count):
            at = len(out) % network.total_hosts
            out.append((one, one.pair or (at, (at + 1) % network.total_hosts)))
    check_whole("TCP flows", len(out), 0, FLOWS_MAX)
    return out


@contextlib.contextmanager
def running(lab: Hosts, wanted: Sequence[Flows]) -> Iterator[list[Took]]:
    """Has flows send while the context lasts; the list then has what they took.

    Nothing runs where no flows are wanted, and the list stays empty. OptionError: a flow is of a
    host that isn't there. LabError: this kernel lacks a congestion control.
    """
    flows = placed(wanted, lab.network)
    took: list[Took] = []
    if not flows:
        yield took
        return
    ends: list[_End] = []
    try:
        ends.append(_End(lab, 1, "echo", PORT - 1))
        ends += [_End(lab, pair[1], "sink", PORT + n) for n, (_, pair) in enumerate(flows)]
        listening = list(ends)
        for one in listening:
            one.await_ready()
        ends.append(_End(lab, 0, "pings", lab.address(1), PORT - 1, PING_MS))
        for number, (kind, pair) in enumerate(flows):
            to = lab.address(pair[1]), PORT + number
            ends.append(_End(lab, pair[0], "source", *to, kind.congestion, kind.share))
        sending = ends[len(listening) :]
        for one in sending:
            one.await_ready()
        yield took
        for one in sending:
            one.stop()
        times, *said = [one.answer() for one in sending]
        got = [sink.answer() for sink in listening[1:]]
        rows = zip(flows, said, got, strict=True)
        took.append(
            Took(
                tuple(
                    FlowTook(kind.congestion, pair, sent["seconds"], came["bytes"], sent["resent"])
                    for (kind, pair), sent, came in rows
                ),
                tuple(times["ms"]),
            )
        )
    finally:
        end([one.process for one in ends], grace=1.0)


class _End:
    """A process of a flow, which says "ready" first and JSON when its stdin ends."""

    def __init__(self, lab: Hosts, host: int, role: str, *arguments: object) -> None:
        self._host, self._role, self._arguments = host, role, arguments
        self.process: subprocess.Popen[Any] = lab.start(
            host,
            [*own_process(role), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def await_ready(self) -> None:
        assert self.process.stdout is not None
        watch = threading.Timer(START_SECONDS, self.process.kill)
        watch.start()
        try:
            ready = self.process.stdout.readline() == "ready\n"
        finally:
            watch.cancel()
        if not ready:
            code = self.process.wait()
            if self._role == "source" and 0 < code < 126:
                raise refused(str(self._arguments[-2]), code)
            raise LabError(f"the end of a TCP flow on host {self._host} ended with status {code}")

    def stop(self) -> None:
        stdin: IO[str] | None = self.process.stdin
        if stdin is not None:
            stdin.close()
            self.process.stdin = None

    def answer(self) -> Any:
        self.stop()
        try:
            text, _ = self.process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            raise LabError(f"a TCP flow didn't end within {END_SECONDS:g} s") from None
        if self.process.returncode:
            raise LabError(f"a TCP flow ended with status {self.process.returncode}")
        return json.loads(text)


def refused(name: str, code: int) -> LabError:
    """The error for a congestion control that hosts can't have, of errno ``code``."""
    if code == errno.ENOENT:
        return LabError(
            f"this kernel has no congestion control called {name!r}; it has "
            f"{_setting('available')}. 'modprobe tcp_{name}' loads one that is a module"
        )
    if code == errno.EPERM:
        allowed = _setting("allowed")
        return LabError(
            f"this machine doesn't allow {name!r} as a host's default congestion control; it "
            f"allows {allowed}. sysctl -w net.ipv4.tcp_allowed_congestion_control='{allowed} "
            f"{name}' does"
        )
    return LabError(f"the congestion control {name!r} can't be set: {os.strerror(code)}")


def _setting(kind: str) -> str:
    text = (SETTINGS / f"tcp_{kind}_congestion_control").read_text(encoding="utf-8")
    return " ".join(text.split())
