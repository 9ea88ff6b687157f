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
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

from lossycoll.options.ranges import is_whole
from lossycoll.runtime.engine.failures import place_text

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

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    leads: bool  # whether this end goes first where they take turns
    session: bytes  # 16 bytes that no stranger knows
    limits: Limits  # that both ends keep

    @property
    def address(self) -> str:
        """Where measurements go: the other end of this very connection."""
        return _source(self.writer)

    @property
    def rtt_ms(self) -> float:
        end = self.writer.get_extra_info("socket")
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        return float(struct.unpack_from("I", info, _TCP_RTT_AT)[0]) / 1000

    def send(self, step: str, **fields: Any) -> None:
        """Says something. Where the connection is broken, ``receive`` tells of it."""
        self.writer.write(_line(step, **fields))

    async def receive(self, step: str, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """The next line, which must be of this step."""
        try:
            line = await _within(seconds, self.reader.readline())
        except asyncio.TimeoutError:
            raise PeerError(
                f"the other doctor has said nothing for {seconds:g} s, at step {step!r}"
            ) from None
        except OSError as error:
            raise PeerError(f"the connection with the other doctor broke: {error}") from error
        except ValueError:
            raise PeerError(f"the other doctor says {ENDLESS}") from None
        if not line.endswith(b"\n"):
            raise PeerError(f"the other doctor has ended, at step {step!r}")
        message = _parsed(line)
        if message.get("step") != step:
            raise PeerError(f"the other doctor is at step {message.get('step')!r}, not {step!r}")
        return message

    async def swap(self, step: str, **fields: Any) -> dict[str, Any]:
        """Says something, and returns what the other end says at the same step."""
        self.send(step, **fields)
        return await self.receive(step)


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
        self._trouble = "no answer"
        self._strangers: set[str] = set()
        self._closed = self._itself = 0
        self._is_greeted = self._has_agreed = False
        self._answers: asyncio.Queue[Control | PeerError] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise PeerError(f"{host!r} is no host that this one knows: {error}") from None
        self._allowed = {plain(str(one[4][0])) for one in found}

    async def find(self, seconds: float) -> Control:
        server = await self._listen()
        self._start(self._connect())
        try:
            found = await _within(seconds, self._answers.get())
        except asyncio.TimeoutError:
            others = ", ".join(sorted(self._strangers)[:4])
            also = f"; refused {others}, which isn't {self._host}" if others else ""
            raise PeerError(
                f"no doctor found at {self._host}, TCP port {self._port}, within {seconds:g} s "
                f"({self._trouble}{also}): run 'lossycoll doctor --peer' "
                f"there as well, naming this host, and let TCP port {self._port} pass in one "
                f"direction (--peer-port chooses another one)"
            ) from None
        finally:
            if server is not None:
                server.close()
            for task in self._tasks:
                task.cancel()
        if isinstance(found, PeerError):
            raise found
        return found

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self) -> asyncio.Server | None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            end = socket.create_server(("", self._port), family=family, dualstack_ipv6=both)
        except OSError:  # where another doctor of this host has the port, connecting is enough
            return None
        return await asyncio.start_server(self._serve, sock=end, limit=LONGEST_LINE)

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = _source(writer)
        if source in self._allowed and len(self._tasks) < MOST_PENDING:
            self._start(self._talk(reader, writer, is_own=False))
            return
        self._strangers.add(source)
        writer.write(_line("refused", why=f"this doctor looks at {self._host}, not {source}"))
        writer.close()

    async def _connect(self) -> None:
        """One connection after another."""
        while True:
            connecting = asyncio.open_connection(self._host, self._port, limit=LONGEST_LINE)
            try:
                await self._talk(*await _within(HELLO_SECONDS, connecting), is_own=True)
            except asyncio.TimeoutError:
                pass
            except OSError as error:
                # A name that isn't found has a number of its own, and several addresses have none.
                code = error.errno or 0
                self._trouble = os.strerror(code) if code > 0 else str(error)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _talk(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_own: bool
    ) -> None:
        """One connection, until it is of no use or both doctors have agreed on it."""
        found: Control | PeerError | None = None
        try:
            found = await self._agree(reader, writer, is_own)
        except PeerError as error:
            # What comes to the listener may be anybody's.
            found = error if is_own else None
        finally:
            if not isinstance(found, Control):
                writer.close()
        if found is not None:
            self._answers.put_nowait(found)

    async def _agree(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_own: bool
    ) -> Control | None:
        own = asdict(self._own)
        writer.write(_line("hello", magic=MAGIC, version=VERSION, nonce=self._nonce, **own))
        try:
            line = await _within(HELLO_SECONDS, self._read_line(reader))
        except asyncio.TimeoutError:
            raise self._no_doctor(f"says nothing for {HELLO_SECONDS:g} s") from None
        if not line:
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
            writer.write(_line("go"))
            self._has_agreed = True
        elif not (line := await self._read_line(reader)):
            return None
        elif _parsed(line).get("step") != "go":
            raise self._no_doctor(f"says {line.strip()[:60]!r}")
        both = "/".join(sorted((self._nonce, nonce)))
        session = hashlib.blake2b(both.encode(), digest_size=16).digest()
        return Control(reader, writer, leads, session, limits)

    async def _read_line(self, reader: asyncio.StreamReader) -> bytes:
        """Empty: the other end has closed the connection."""
        try:
            line = await reader.readline()
        except OSError:
            return b""
        except ValueError:
            raise self._no_doctor(f"says {ENDLESS}") from None
        return line if line.endswith(b"\n") else b""

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
            raise self._no_doctor(f"says {line.strip()[:60]!r}")
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
            f"'lossycoll doctor --peer' there, and choose a free port by --peer-port on both ends; "
            f"if this is a rank's control port: --peer {place_text(self._host, self._port)}"
        )


def _source(writer: asyncio.StreamWriter) -> str:
    return plain(str(writer.get_extra_info("peername")[0]))


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


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PeerError(f"the other doctor says {line[:40]!r}, which isn't of its protocol")
    return found
