"""The connection by which the two doctors agree: lines of JSON over TCP, each checked.

Both listen and both connect, so that one open direction is enough. Only addresses of the host that
was named are let in, and measurements go to the address of this connection alone: a doctor can't be
made to send anywhere else. Packets carry a session that is made of a nonce from each end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

from lossycoll.options.ranges import is_whole

_Result = TypeVar("_Result")
MAGIC: Final = "lossycoll doctor"
VERSION: Final = 1
LONGEST_LINE: Final = 1 << 16
ENDLESS: Final = f"more than {LONGEST_LINE} bytes without an end of line"
HELLO_SECONDS: Final = 5.0
"""Longest time for the listener to answer that it is a doctor."""
PAUSE_SECONDS: Final = 0.5
ATTEMPTS: Final = 3
"""Attempts that must all fail alike before a failure is believed."""
ANSWER_SECONDS: Final = 30.0
MOST_PENDING: Final = 16
_TCP_RTT_AT: Final = 68
"""Offset of tcpi_rtt in struct tcp_info."""


class PeerError(Exception):
    """The other end is no doctor, can't be reached, or has gone."""


@dataclass(frozen=True)
class Limits:
    """Limits of what may be sent: an end's own, or those that both keep."""

    mtu: int  # of the interface
    budget: int  # bytes of the fastest train
    idle: int  # seconds
    rate: int  # Mbit/s of the fastest train


@dataclass
class Control:
    """A connection with the other doctor."""

    end: socket.socket
    received: bytearray
    leads: bool  # whether this end goes first where they take turns
    session: bytes  # 16 bytes that no stranger knows
    limits: Limits  # that both ends keep

    @property
    def address(self) -> str:
        """Where measurements go: the other end of this very connection."""
        return plain(str(self.end.getpeername()[0]))

    @property
    def rtt_ms(self) -> float:
        info = self.end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        return float(struct.unpack_from("I", info, _TCP_RTT_AT)[0]) / 1000

    def send(self, step: str, **fields: Any) -> None:
        try:
            self.end.settimeout(ANSWER_SECONDS)
            self.end.sendall(_line(step, **fields))
        except OSError as error:
            raise PeerError(f"the connection with the other doctor broke: {error}") from error

    def receive(self, step: str, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """The next line, which must be of this step."""
        end = time.monotonic() + seconds
        while (line := _next_line(self.received)) is None:
            self.end.settimeout(max(0.001, end - time.monotonic()))
            try:
                data = self.end.recv(4096)
            except TimeoutError:
                raise PeerError(
                    f"the other doctor has said nothing for {seconds:g} s, at step {step!r}"
                ) from None
            except OSError as error:
                raise PeerError(f"the connection with the other doctor broke: {error}") from error
            if not data:
                raise PeerError(f"the other doctor has ended, at step {step!r}")
            self.received += data
        message = _parsed(line)
        if message.get("step") != step:
            raise PeerError(f"the other doctor is at step {message.get('step')!r}, not {step!r}")
        return message

    def swap(self, step: str, **fields: Any) -> dict[str, Any]:
        """Says something, and returns what the other end says at the same step."""
        self.send(step, **fields)
        return self.receive(step)

    def close(self) -> None:
        self.end.close()


def number(message: Mapping[str, Any], name: str, low: int, high: int) -> int:
    found = message.get(name)
    if not is_whole(found, low, high):
        raise PeerError(f"the other doctor says {name} {found!r}, wanted {low} to {high}")
    return found


def numbers(message: Mapping[str, Any], name: str, most: int, high: int) -> list[int]:
    found = message.get(name)
    if not isinstance(found, list) or len(found) > most:
        raise PeerError(f"the other doctor says {name} {str(found)[:40]!r}, wanted up to {most}")
    return [number({name: one}, name, 0, high) for one in found]


def plain(address: str) -> str:
    """An address without zone, and IPv4 as such."""
    return address.partition("%")[0].removeprefix("::ffff:")


class Meeting:
    """Finds the other doctor. ``find``, once."""

    def __init__(self, host: str, port: int, own: Limits) -> None:
        self._host = host
        self._port = port
        self._own = own
        self._nonce = secrets.token_hex(16)
        self._hello = _line("hello", magic=MAGIC, version=VERSION, nonce=self._nonce, **asdict(own))
        self._trouble = "no answer"
        self._strangers: set[str] = set()
        self._closed = self._itself = 0
        self._is_greeted = self._has_agreed = False
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise PeerError(f"{host!r} is no host that this one knows: {error}") from None
        self._family, self._place = next(
            ((one[0], one[4]) for one in found if _is_routed(one[0], one[4])),
            (found[0][0], found[0][4]),
        )
        self._allowed = {plain(str(one[4][0])) for one in found}

    def find(self, seconds: float) -> Control:
        return asyncio.run(self._find(seconds))

    async def _find(self, seconds: float) -> Control:
        self._answers: asyncio.Queue[Control | PeerError] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()  # ends with the loop
        self._start(self._listen())
        self._start(self._connect())
        try:
            found = await asyncio.wait_for(self._answers.get(), seconds)
        except asyncio.TimeoutError:
            others = ", ".join(sorted(self._strangers)[:4])
            also = f"; refused {others}, which isn't {self._host}" if others else ""
            raise PeerError(
                f"no doctor found at {self._host}, TCP port {self._port}, within {seconds:g} s "
                f"({self._trouble}{also}): run 'lossycoll doctor --peer' "
                f"there as well, naming this host, and let TCP port {self._port} pass in one "
                f"direction (--peer-port chooses another one)"
            ) from None
        if isinstance(found, PeerError):
            raise found
        return found

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self) -> None:
        listener = socket.socket(self._family, socket.SOCK_STREAM)
        with listener, contextlib.suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Where another doctor of this host has the port, connecting is enough.
            listener.bind(("", self._port))
            listener.listen(MOST_PENDING)
            listener.setblocking(False)
            while True:
                end, place = await asyncio.get_running_loop().sock_accept(listener)
                source = plain(str(place[0]))
                if source in self._allowed and len(self._tasks) < MOST_PENDING:
                    self._start(self._talk(end, is_own=False))
                    continue
                self._strangers.add(source)
                why = f"this doctor looks at {self._host}, not {source}"
                with end, contextlib.suppress(OSError):
                    end.send(_line("refused", why=why))

    async def _connect(self) -> None:
        """One connection after another."""
        while True:
            with socket.socket(self._family, socket.SOCK_STREAM) as end:
                end.setblocking(False)
                connecting = asyncio.get_running_loop().sock_connect(end, self._place)
                try:
                    await _within(HELLO_SECONDS, connecting)
                    await self._talk(end, is_own=True)
                except asyncio.TimeoutError:
                    pass
                except OSError as error:
                    self._trouble = os.strerror(error.errno or 0)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _talk(self, end: socket.socket, *, is_own: bool) -> None:
        """One connection, until it is of no use or both doctors have agreed on it."""
        with end:
            found: Control | PeerError | None = None
            try:
                found = await self._agree(end, is_own)
            except PeerError as error:
                # What comes to the listener may be anybody's.
                found = error if is_own else None
            except OSError as error:
                self._trouble = os.strerror(error.errno or 0)
            if found is not None:
                self._answers.put_nowait(found)

    async def _agree(self, end: socket.socket, is_own: bool) -> Control | None:
        received = bytearray()
        with contextlib.suppress(OSError):
            end.send(self._hello)
        try:
            line = await _within(HELLO_SECONDS, _read_line(end, received))
        except asyncio.TimeoutError:
            raise self._no_doctor(f"says nothing for {HELLO_SECONDS:g} s") from None
        except PeerError:
            raise self._no_doctor(f"says {ENDLESS}") from None
        if line is None:
            # The other end drops what it doesn't need, once it has found this one.
            self._closed += is_own and not self._is_greeted
            if self._closed == ATTEMPTS:
                raise self._no_doctor("closes the connection without a word")
            return None
        nonce, limits = self._read_hello(line)
        if nonce == self._nonce:
            # Another doctor of this host may connect as well; else it is the wrong host.
            self._itself += 1
            if self._itself >= 2 * ATTEMPTS:
                raise PeerError(f"{self._host} is this host: name the other one")
            return None
        self._is_greeted = True
        leads = self._nonce < nonce
        if leads and self._has_agreed:
            return None
        if leads:
            end.send(_line("go"))
            self._has_agreed = True
        elif (line := await _read_line(end, received)) is None:
            return None
        elif _parsed(line).get("step") != "go":
            raise self._no_doctor(f"says {line[:60]!r}")
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        both = "/".join(sorted((self._nonce, nonce)))
        session = hashlib.blake2b(both.encode(), digest_size=16).digest()
        return Control(end.dup(), received, leads, session, limits)

    def _read_hello(self, line: bytes) -> tuple[str, Limits]:
        """Nonce of the other doctor, and the limits that both ends keep."""
        said: dict[str, Any] = {}
        with contextlib.suppress(PeerError):
            said = _parsed(line)
        if said.get("step") == "refused":
            raise PeerError(f"the doctor at {self._host} refuses: {str(said.get('why'))[:200]}")
        nonce = said.get("nonce")
        is_hello = said.get("step") == "hello" and said.get("magic") == MAGIC
        if not is_hello or not isinstance(nonce, str) or len(nonce) != 32:
            raise self._no_doctor(f"says {line[:60]!r}")
        if said.get("version") != VERSION:
            raise PeerError(
                f"the doctor at {self._host} speaks version {said.get('version')!r}, this one "
                f"{VERSION}: install the same lossycoll on both hosts"
            )
        own = self._own
        return nonce, Limits(
            min(own.mtu, number(said, "mtu", 68, 1 << 17)),
            min(own.budget, number(said, "budget", 0, 1 << 40)),
            min(own.idle, number(said, "idle", 0, 1 << 20)),
            min(own.rate, number(said, "rate", 1, 1 << 40)),
        )

    def _no_doctor(self, what: str) -> PeerError:
        return PeerError(
            f"something else listens at {self._host}, TCP port {self._port}: it {what}; run "
            f"'lossycoll doctor --peer' there, and choose a free port by --peer-port on both ends"
        )


def _is_routed(family: int, place: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
    except OSError:
        return False
    return True


def _line(step: str, **fields: Any) -> bytes:
    return json.dumps({"step": step, **fields}).encode() + b"\n"


async def _within(seconds: float, work: Coroutine[Any, Any, _Result]) -> _Result:
    """As asyncio.wait_for, which before Python 3.12 may lose that its caller is cancelled."""
    task = asyncio.create_task(work)
    # Of a caller that is cancelled nobody asks for the outcome, and asyncio would complain of that.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    if not (await asyncio.wait([task], timeout=seconds))[0]:
        task.cancel()
        raise asyncio.TimeoutError
    return task.result()


async def _read_line(end: socket.socket, received: bytearray) -> bytes | None:
    """None: the other end has closed the connection."""
    while (line := _next_line(received)) is None:
        try:
            data = await asyncio.get_running_loop().sock_recv(end, 4096)
        except OSError:
            return None
        if not data:
            return None
        received += data
    return line


def _next_line(received: bytearray) -> bytes | None:
    line, ended, rest = received.partition(b"\n")
    if ended:
        received[:] = rest
        return bytes(line)
    if len(received) > LONGEST_LINE:
        raise PeerError(f"the other doctor says {ENDLESS}")
    return None


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PeerError(f"the other doctor says {line[:40]!r}, which isn't of its protocol")
    return found
