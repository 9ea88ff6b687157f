"""Out-of-band datagrams by an engine's socket, of which the engine believes nothing.

A user that wants the engine's reflexive address, or to open a route through a NAT, has to send from
this socket.
"""

from __future__ import annotations

import ipaddress
import threading
from typing import Any, Final, TypeAlias

from lossycoll._native import ffi, lib

MOST_BYTES: Final[int] = lib.LC_OOB_BYTES
MARK: Final = b"OOBD"
"""First bytes of each."""
Place: TypeAlias = tuple[str, int]
"""Numeric host, and port."""


class OutOfBand:
    """Out-of-band datagrams of one host. Any thread may call."""

    def __init__(self, handle: Any, descriptor: int) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._datagram = ffi.new("lc_oob_datagram *")
        self.descriptor = descriptor

    def say(self, place: Place, data: bytes) -> bool:
        """Sends one datagram; False where the system took nothing. A sent one may be lost later."""
        host = ffi.new("char[]", place[0].encode())
        address = ffi.new("lc_address *", {"host": host, "port": place[1]})
        with self._lock:
            if self._handle == ffi.NULL:
                return False
            return bool(lib.lc_host_say(self._handle, address, data, len(data)) == 0)

    def heard(self) -> tuple[Place, bytes] | None:
        """The oldest one that has come, and where from; None: there is none."""
        with self._lock:
            found = self._datagram
            if self._handle == ffi.NULL or not lib.lc_host_heard(self._handle, found):
                return None
            address = ipaddress.IPv6Address(bytes(found.address))
            host = str(address.ipv4_mapped or address)
            return (host, int(found.port)), bytes(ffi.buffer(found.data, found.length))

    @property
    def dropped(self) -> int:
        """Number of datagrams that were too long, or found no room."""
        with self._lock:
            return 0 if self._handle == ffi.NULL else int(lib.lc_host_oob_dropped(self._handle))

    def close(self) -> None:
        """Before the host is closed. Idempotent."""
        with self._lock:
            self._handle = ffi.NULL
