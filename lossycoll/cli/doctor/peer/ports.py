"""Ports of each end that the other one reaches, by TCP and by UDP, both ways at once.

UDP packets go from a port to a port, as those of ranks do: a filter that lets answers in lets in
what it would let in of a job.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Final

from .control import Control, number, numbers
from .packets import PORT, open_udp, packet, take

MOST_PORTS: Final = 32
"""Most ports of a range that are tried, evenly spread."""
FREE_PORTS: Final = 14
"""Ports to try if there is no range."""
SECONDS: Final = 2.5
SEND_PAUSE: Final = 0.3
TOKEN_BYTES: Final = 16


@dataclass
class Ports:
    """This end's. ``busy``: those of the range that something else has."""

    udp: list[socket.socket] = field(default_factory=list)
    tcp: list[socket.socket] = field(default_factory=list)
    busy: int = 0

    def close(self) -> None:
        for end in [*self.udp, *self.tcp]:
            end.close()


@dataclass(frozen=True)
class Reached:
    """Ports that one direction lets through."""

    tcp: dict[int, str]  # what became of each port that was tried: "" where it was reached
    udp: list[int]  # ports that were tried
    heard: list[int]  # numbers of ``udp`` from whose counterpart a packet came
    busy: int = 0  # ports of the receiver's range that something else has

    @property
    def is_open(self) -> bool:
        return bool(self.heard) and not any(self.tcp.values())


@dataclass(frozen=True)
class Reach:
    """Both directions. ``seen``: this end's address and port as the other end sees them, beside
    what they are here; None: no packet of it came."""

    out: Reached
    back: Reached
    seen: tuple[tuple[str, int], tuple[str, int]] | None
    targets: list[tuple[str, int]]
    """Addresses of the other end's UDP ports."""


def open_ports(address: str, ports: tuple[int, int]) -> Ports:
    """Ports as ranks would take them; (0, 0): any."""
    first, last = ports
    if first == 0:
        wanted = [0] * FREE_PORTS
    else:
        count = min(MOST_PORTS, last - first + 1)
        step = (last - first) / max(1, count - 1)
        wanted = sorted({first + round(i * step) for i in range(count)})
    made = Ports()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in wanted:
        try:
            udp = open_udp(address, port)
        except OSError:
            made.busy += 1
            continue
        tcp = socket.socket(family, socket.SOCK_STREAM)
        try:
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tcp.bind((address, port))
            tcp.listen(8)
            tcp.setblocking(False)
        except OSError:
            tcp.close()
            udp.close()
            made.busy += 1
            continue
        made.udp.append(udp)
        made.tcp.append(tcp)
    return made


def try_ports(control: Control, ports: Ports) -> Reach:
    """Tries all ports of both ends."""
    mine_udp = [end.getsockname()[1] for end in ports.udp]
    mine_tcp = [end.getsockname()[1] for end in ports.tcp]
    said = control.swap("ports", udp=mine_udp, tcp=mine_tcp, busy=ports.busy)
    theirs_udp = numbers(said, "udp", MOST_PORTS, 65535)
    theirs_tcp = numbers(said, "tcp", MOST_PORTS, 65535)
    their_busy = number(said, "busy", 0, 65535)
    targets = [(control.address, port) for port in theirs_udp[: len(ports.udp)]]
    attempt = _Attempt(control, ports, targets, theirs_tcp)
    attempt.run()
    told = control.swap(
        "reached",
        udp=sorted(attempt.heard),
        tcp=sorted(attempt.accepted),
        seen=list(attempt.sources.get(min(attempt.sources, default=-1), ())),
        first=min(attempt.sources, default=-1) + 1,
    )
    heard = [one for one in numbers(told, "udp", MOST_PORTS, MOST_PORTS) if one < len(targets)]
    arrived = set(numbers(told, "tcp", MOST_PORTS, 65535))
    out = {
        port: "" if port in arrived else attempt.trouble.get(port) or "no answer"
        for port in theirs_tcp
    }
    back = {port: "" if port in attempt.accepted else "nothing came" for port in mine_tcp}
    pairs = len(targets)
    seen = _seen(told, ports)
    return Reach(
        Reached(out, theirs_udp[:pairs], heard, their_busy),
        Reached(back, mine_udp[:pairs], sorted(attempt.heard), ports.busy),
        seen,
        targets,
    )


def _seen(told: dict[str, object], ports: Ports) -> tuple[tuple[str, int], tuple[str, int]] | None:
    first = number(told, "first", 0, MOST_PORTS) - 1
    found = told.get("seen")
    if not (0 <= first < len(ports.udp) and isinstance(found, list) and len(found) == 2):
        return None
    address, port = found
    if not (isinstance(address, str) and address.isprintable() and isinstance(port, int)):
        return None
    own = ports.udp[first].getsockname()
    return (str(own[0]), int(own[1])), (address[:64], port)


class _Attempt:
    """Packets and connections of one end, to and from all ports."""

    def __init__(
        self, control: Control, ports: Ports, targets: list[tuple[str, int]], tcp: list[int]
    ) -> None:
        self._control = control
        self._ports = ports
        self._targets = targets
        self._tcp = tcp
        self._selector = selectors.DefaultSelector()
        self.heard: set[int] = set()
        self.sources: dict[int, tuple[str, int]] = {}
        self.accepted: set[int] = set()
        self.trouble: dict[int, str] = {}
        self._open: list[socket.socket] = []

    def run(self) -> None:
        for index, end in enumerate(self._ports.udp):
            self._selector.register(end, selectors.EVENT_READ, ("udp", index))
        for end in self._ports.tcp:
            self._selector.register(end, selectors.EVENT_READ, ("listen", end.getsockname()[1]))
        for port in self._tcp:
            self._connect(port)
        begin = time.monotonic()
        sent = -SEND_PAUSE
        try:
            while (now := time.monotonic()) - begin < SECONDS:
                if now - sent >= SEND_PAUSE:
                    sent = now
                    self._send()
                for key, _ in self._selector.select(0.05):
                    self._serve(key.fileobj, *key.data)  # type: ignore[arg-type]
        finally:
            for end in [*self._ports.udp, *self._ports.tcp]:
                self._selector.unregister(end)
            self._selector.close()
            for one in self._open:
                one.close()

    def _send(self) -> None:
        for index, (end, to) in enumerate(zip(self._ports.udp, self._targets, strict=False)):
            with contextlib.suppress(OSError):
                end.sendto(packet(self._control, PORT, 0, index), to)

    def _connect(self, port: int) -> None:
        listener = self._ports.tcp[0] if self._ports.tcp else None
        family = self._control.end.family
        end = socket.socket(family, socket.SOCK_STREAM)
        end.setblocking(False)
        if listener is not None:
            with contextlib.suppress(OSError):
                end.bind((listener.getsockname()[0], 0))
        code = end.connect_ex((self._control.address, port))
        if code not in (0, errno.EINPROGRESS):
            self.trouble[port] = os.strerror(code).lower()
            end.close()
            return
        self._open.append(end)
        self._selector.register(end, selectors.EVENT_WRITE, ("connect", port))

    def _serve(self, end: socket.socket, what: str, number: int) -> None:
        if what == "udp":
            for arrival, place in take(end, self._control, PORT, 0):
                if arrival.number == number:
                    self.heard.add(number)
                    self.sources[number] = place
        elif what == "listen":
            with contextlib.suppress(OSError):
                other, _ = end.accept()
                other.setblocking(False)
                self._open.append(other)
                self._selector.register(other, selectors.EVENT_READ, ("token", number))
        elif what == "connect":
            self._selector.unregister(end)
            code = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self.trouble[number] = os.strerror(code).lower()
            else:
                with contextlib.suppress(OSError):
                    end.send(self._control.session)
        else:
            self._selector.unregister(end)
            with contextlib.suppress(OSError):
                if end.recv(TOKEN_BYTES) == self._control.session:
                    self.accepted.add(number)
