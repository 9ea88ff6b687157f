"""Flows of TCP between hosts while a job runs, and round trips beside them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..errors import LabError
from .job import Role
from .network import Network, check_congestion, check_real, check_whole

if TYPE_CHECKING:
    from .laboratory import Lab

PORT: Final = 29100
"""Port of the first flow; the others' follow it. The port before it is that of the round trips."""
FLOWS_MAX: Final = 64


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
        check_real("TCP flows' share of the time", self.share, 0.001, 1, "0.001 to 1")


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

    def since(self, before: FlowTook) -> FlowTook:
        seconds, resent = self.seconds - before.seconds, self.resent - before.resent
        return replace(self, seconds=seconds, bytes=self.bytes - before.bytes, resent=resent)


@dataclass(frozen=True)
class Took:
    """All flows, and the times in ms of round trips of small packets from host 0 to host 1."""

    flows: tuple[FlowTook, ...]
    round_trips: tuple[float, ...]

    @property
    def percentiles(self) -> dict[str, float] | None:
        """Of the round trips; None if none came back."""
        times = sorted(self.round_trips)
        if not times:
            return None
        p50, p99 = (times[min(len(times) - 1, int(share * len(times)))] for share in (0.5, 0.99))
        return {"p50_ms": p50, "p99_ms": p99, "p99/p50": p99 / p50}


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
def running(lab: Lab, wanted: Sequence[Flows]) -> Iterator[list[Took]]:
    """Has flows send while the context lasts; the list then has what they took.

    Nothing runs where no flows are wanted, and the list stays empty. OptionError: a flow is of a
    host that isn't there. LabError: this kernel lacks a congestion control.
    """
    flows = placed(wanted, lab.network)
    took: list[Took] = []
    if not flows:
        yield took
        return
    with contextlib.ExitStack() as undo:

        def role(host: int, name: str, *arguments: object) -> Role:
            return undo.enter_context(Role(lab, host, name, *arguments))

        echo = role(1, "echo", PORT - 1)
        sinks = [role(pair[1], "sink", PORT + n) for n, (_, pair) in enumerate(flows)]
        for one in (echo, *sinks):
            one.await_ready()
        pings = role(0, "pings", lab.address(1), PORT - 1, 10)
        sources = []
        for number, (kind, pair) in enumerate(flows):
            to = lab.address(pair[1]), PORT + number
            sources.append(role(pair[0], "source", *to, kind.congestion, kind.share))
        pings.await_ready()
        for source, (kind, _) in zip(sources, flows, strict=True):
            try:
                source.await_ready()
            except LabError:
                code = source.process.returncode
                if code is not None and 0 < code < 126:  # an errno
                    raise refused(kind.congestion, code) from None
                raise
        yield took
        for one in (pings, *sources):
            one.stop()
        times, *said = [one.answer() for one in (pings, *sources)]
        got = [sink.answer() for sink in sinks]
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
    text = Path(f"/proc/sys/net/ipv4/tcp_{kind}_congestion_control").read_text(encoding="utf-8")
    return " ".join(text.split())
