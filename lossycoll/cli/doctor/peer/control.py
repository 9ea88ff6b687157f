"""The connection by which the two doctors agree: lines of JSON over TCP, each checked.

Both listen and both connect, so that one open direction is enough. Only addresses of the host that
was named are let in, and measurements go to the address of this connection alone: a doctor can't be
made to send anywhere else. Packets carry a session that is made of a nonce from each end.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

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


@dataclass(frozen=True, slots=True)
class Peer:
    """Hello of the other end, checked."""

    address: str  # of the interface that its ranks would use
    device: str  # that interface
    mtu: int  # the interface's
    budget: int
    idle: int
    rate: int


@dataclass
class Control:
    """A connection with the other doctor."""

    end: socket.socket
    received: bytearray
    leads: bool  # whether this end goes first where they take turns
    session: bytes  # 16 bytes that no stranger knows
    peer: Peer

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
        message = _parsed(bytes(line))
        if message.get("step") != step:
            raise PeerError(f"the other doctor is at step {message.get('step')!r}, not {step!r}")
        return message

    def swap(self, step: str, seconds: float = ANSWER_SECONDS, **fields: Any) -> dict[str, Any]:
        """Says something, and returns what the other end says at the same step."""
        self.send(step, **fields)
        return self.receive(step, seconds)

    def close(self) -> None:
        self.end.close()


def number(message: Mapping[str, Any], name: str, low: int, high: int) -> int:
    found = message.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= high:
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


@dataclass
class _Pending:
    """A connection whose other end hasn't said all that it must."""

    end: socket.socket
    since: float
    is_own: bool
    """This end has made it."""
    connecting: bool
    received: bytearray = field(default_factory=bytearray)
    hello: dict[str, Any] | None = None


class Meeting:
    """Finds the other doctor. ``find``, once."""

    def __init__(self, host: str, port: int, hello: Mapping[str, Any]) -> None:
        self._host = host
        self._port = port
        self._nonce = secrets.token_hex(16)
        self._hello = _line("hello", magic=MAGIC, version=VERSION, nonce=self._nonce, **hello)
        self._pending: dict[int, _Pending] = {}
        self._selector = selectors.DefaultSelector()
        self._trouble = "no answer"
        self._strangers: set[str] = set()
        self._closed = self._own = 0
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
        end = time.monotonic() + seconds
        tried = -PAUSE_SECONDS
        listener = self._listener()
        try:
            while time.monotonic() < end:
                now = time.monotonic()
                if now - tried >= PAUSE_SECONDS and not any(
                    one.is_own for one in self._pending.values()
                ):
                    tried = now
                    self._connect(now)
                for key, _ in self._selector.select(0.1):
                    if key.data is None:
                        self._accept(listener)
                    elif (found := self._serve(key.data)) is not None:
                        return found
                self._check_silent()
        finally:
            for one in list(self._pending.values()):
                self._drop(one)
            if listener is not None:
                listener.close()
            self._selector.close()
        others = ", ".join(sorted(self._strangers)[:4])
        also = f"; refused {others}, which isn't {self._host}" if others else ""
        raise PeerError(
            f"no doctor found at {self._host}, TCP port {self._port}, within {seconds:g} s "
            f"({self._trouble}{also}): run 'lossycoll doctor --peer' "
            f"there as well, naming this host, and let TCP port {self._port} pass in one direction "
            f"(--peer-port chooses another one)"
        )

    def _listener(self) -> socket.socket | None:
        listener = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", self._port))
            listener.listen(MOST_PENDING)
        except OSError:  # another doctor of this host has it: connecting is enough
            listener.close()
            return None
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        return listener

    def _connect(self, now: float) -> None:
        end = socket.socket(self._family, socket.SOCK_STREAM)
        end.setblocking(False)
        code = end.connect_ex(self._place)
        if code not in (0, errno.EINPROGRESS):
            self._trouble = os.strerror(code)
            end.close()
            return
        self._add(_Pending(end, now, is_own=True, connecting=True))

    def _accept(self, listener: socket.socket | None) -> None:
        assert listener is not None
        try:
            end, place = listener.accept()
        except OSError:
            return
        end.setblocking(False)
        source = plain(str(place[0]))
        if source not in self._allowed or len(self._pending) >= MOST_PENDING:
            self._strangers.add(source)
            with contextlib.suppress(OSError):
                end.send(_line("refused", why=f"this doctor looks at {self._host}, not {source}"))
            end.close()
            return
        one = _Pending(end, time.monotonic(), is_own=False, connecting=False)
        self._add(one)
        self._greet(one)

    def _add(self, one: _Pending) -> None:
        self._pending[one.end.fileno()] = one
        what = selectors.EVENT_WRITE if one.connecting else selectors.EVENT_READ
        self._selector.register(one.end, what, one)

    def _drop(self, one: _Pending) -> None:
        if self._pending.pop(one.end.fileno(), None) is not None:
            self._selector.unregister(one.end)
        one.end.close()

    def _greet(self, one: _Pending) -> None:
        with contextlib.suppress(OSError):
            one.end.send(self._hello)

    def _serve(self, one: _Pending) -> Control | None:
        if one.connecting:
            code = one.end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._trouble = os.strerror(code)
                self._drop(one)
                return None
            one.connecting, one.since = False, time.monotonic()
            self._selector.modify(one.end, selectors.EVENT_READ, one)
            self._greet(one)
            return None
        try:
            data = one.end.recv(4096)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self._drop(one)
            # The other end drops what it doesn't need, once it has found this one.
            if one.is_own and one.hello is None and not self._greeted:
                self._closed += 1
                if self._closed == ATTEMPTS:
                    raise self._no_doctor("closes the connection without a word")
            return None
        one.received += data
        try:
            return self._read(one)
        except PeerError:
            if one.is_own:
                raise
            self._drop(one)  # what comes here may be anybody's
            return None

    def _read(self, one: _Pending) -> Control | None:
        while (line := self._first_line(one)) is not None:
            try:
                message = _parsed(bytes(line))
            except PeerError:
                raise self._no_doctor(f"says {bytes(line[:40])!r}") from None
            step = message.get("step")
            if step == "refused":
                raise PeerError(
                    f"the doctor at {self._host} refuses: {str(message.get('why'))[:200]}"
                )
            if step == "hello" and one.hello is None:
                hello = self._checked(message)
                if hello["nonce"] == self._nonce:
                    self._meets_itself(one)
                    return None
                one.hello = hello
                if self._leads(one.hello):
                    self._send_go(one)
                    return self._control(one)
            elif step == "go" and one.hello is not None and not self._leads(one.hello):
                return self._control(one)
            else:
                raise self._no_doctor(f"says {bytes(line[:40])!r}")
        return None

    def _first_line(self, one: _Pending) -> bytearray | None:
        try:
            return _next_line(one.received)
        except PeerError:
            raise self._no_doctor(f"says {ENDLESS}") from None

    @property
    def _greeted(self) -> bool:
        return any(one.hello is not None for one in self._pending.values())

    def _send_go(self, one: _Pending) -> None:
        try:
            one.end.send(_line("go"))
        except OSError as error:
            raise PeerError(f"the connection with the other doctor broke: {error}") from error

    def _leads(self, hello: Mapping[str, Any]) -> bool:
        return self._nonce < str(hello["nonce"])

    def _checked(self, message: dict[str, Any]) -> dict[str, Any]:
        nonce = message.get("nonce")
        if message.get("magic") != MAGIC or not isinstance(nonce, str) or len(nonce) != 32:
            raise self._no_doctor(f"says {str(message)[:60]!r}")
        if message.get("version") != VERSION:
            raise PeerError(
                f"the doctor at {self._host} speaks version {message.get('version')!r}, this one "
                f"{VERSION}: install the same lossycoll on both hosts"
            )
        return message

    def _meets_itself(self, one: _Pending) -> None:
        """Another doctor of this host may connect as well; else it is the wrong host."""
        self._own += 1
        self._drop(one)
        if self._own >= 2 * ATTEMPTS:
            raise PeerError(f"{self._host} is this host: name the other one")

    def _control(self, one: _Pending) -> Control:
        hello = one.hello
        assert hello is not None
        del self._pending[one.end.fileno()]
        self._selector.unregister(one.end)
        leads = self._leads(hello)
        nonces = sorted((self._nonce, str(hello["nonce"])))
        session = hashlib.blake2b("/".join(nonces).encode(), digest_size=16).digest()
        one.end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Control(one.end, one.received, leads, session, _peer(hello))

    def _check_silent(self) -> None:
        now = time.monotonic()
        for one in list(self._pending.values()):
            if one.hello is None and now - one.since > HELLO_SECONDS:
                self._drop(one)
                if one.is_own and not one.connecting:
                    raise self._no_doctor(f"says nothing for {HELLO_SECONDS:g} s")

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


def _peer(hello: Mapping[str, Any]) -> Peer:
    texts = [hello.get(name) for name in ("address", "device")]
    address, device = (
        one if isinstance(one, str) and one.isprintable() and len(one) < 64 else "" for one in texts
    )
    return Peer(
        address,
        device,
        number(hello, "mtu", 68, 1 << 17),
        number(hello, "budget", 0, 1 << 40),
        number(hello, "idle", 0, 1 << 20),
        number(hello, "rate", 1, 1 << 40),
    )


def _line(step: str, **fields: Any) -> bytes:
    return json.dumps({"step": step, **fields}).encode() + b"\n"


def _next_line(received: bytearray) -> bytearray | None:
    at = received.find(b"\n")
    if at < 0:
        if len(received) > LONGEST_LINE:
            raise PeerError(f"the other doctor says {ENDLESS}")
        return None
    line = received[:at]
    del received[: at + 1]
    return line


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise PeerError(f"the other doctor says {line[:40]!r}, which isn't of its protocol")
    return found
