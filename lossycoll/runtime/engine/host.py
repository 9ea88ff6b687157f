"""This process among those that it meets: the engine's one socket and thread, from Python."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from lossycoll._native import ffi, lib
from lossycoll.errors import ClosedError, no_udp_port
from lossycoll.options.fields import Options
from lossycoll.options.schema import row
from lossycoll.options.texts import FAST_PATHS
from lossycoll.plan import Topology
from lossycoll.runtime.keys.aead import CIPHERS

from .failures import Failure, Where, error_of, place_text
from .gates import Wakers
from .link_events import LinkEvent, LinkEventKind
from .payload import SHARED_PAYLOAD
from .reports import LinkInfo, data_of
from .status_page import Job, StatusPage
from .verbs_port import VerbsAddress, VerbsPort

HOST_OPTIONS: Final = tuple(entry.name for entry in fields(Options) if row(entry).of_host)
"""The options that belong to a host."""

SHARED_LINK: Final = 1
"""The number of the link of shared memory; the socket's is 0."""
MOST_OUT_OF_BAND: Final[int] = lib.LC_OOB_BYTES
"""Bytes of an out-of-band datagram."""
MARK: Final = b"OOBD"
"""First bytes of each."""
Address: TypeAlias = tuple[str, int]
"""Numeric host, and port."""


class Host:
    """One process's socket, progress thread, and paths to the other processes.

    Opened at once; ``start`` makes the other processes known. Groups
    (:class:`lossycoll.runtime.engine.binding.EngineGroup`) are made after that. Its users count
    themselves (:meth:`hold`, :meth:`release`; who opens it is the first): the last one closes it.

    ``address``: the numeric address to bind. ``payload_bytes``: data bytes per packet; equal
    everywhere. ``setting``: address of the links and the time that it has (an lc_setting) instead
    of the system's: then it has no thread, and nothing may wait for it. 0: the system's.
    """

    def __init__(
        self,
        process: int,
        processes: int,
        address: str,
        *,
        payload_bytes: int,
        options: Options,
        setting: int = 0,
    ) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._users = 1
        self.options = host_options(options)
        self._options = options
        self.is_sealed = False
        """Whether what leaves this machine is sealed."""
        self.process = process
        self.processes = processes
        self.topology = Topology.flat(processes)
        """Topology of the processes, as ``start`` is told."""
        self.addresses: list[str] = [address] * processes
        self._where = Where(process, processes, addresses=self.addresses)
        config = ffi.new("lc_host_config *")
        text = ffi.new("char[]", address.encode())
        config.address = text
        config.process = process
        config.processes = processes
        config.payload_bytes = payload_bytes
        config.socket_buffer = options.socket_buffer
        config.disable = sum(
            1 << i for i, name in enumerate(FAST_PATHS) if name in options.disabled
        )
        config.eager_bytes = options.eager
        config.pace_bytes_per_s = options.pace
        config.paces_port = options.pacing == "port"
        config.keepalive_ns = math.ceil(options.keepalive * 1e9)
        self._wakers: Wakers | None = None
        self._out_of_band: OutOfBand | None = None
        self._page: StatusPage | None = None
        self._session = 0
        self._claims: dict[str, socket.socket | None] = {}
        self._verbs_link = 0
        self.handle = ffi.NULL
        failure = ffi.new("lc_failure *")
        first, last = options.ports
        for port in range(first, last + 1):
            config.port = port
            self.handle = (
                lib.lc_host_open_in(config, ffi.cast("lc_setting *", setting), failure)
                if setting
                else lib.lc_host_open(config, failure)
            )
            if self.handle != ffi.NULL:
                return
        found = failure_of(failure)
        if first and found.errno == errno.EADDRINUSE:
            raise no_udp_port(process, processes, address, options.ports)
        raise error_of(found, self._where)

    def share(self, processes: Sequence[int]) -> tuple[int, int]:
        """Opens memory that other processes of this machine can read; before ``start``."""
        numbers = ffi.new("uint16_t[]", list(processes))
        descriptors, failure = ffi.new("int[2]"), ffi.new("lc_failure *")
        code = lib.lc_host_share(self.handle, numbers, len(processes), descriptors, failure)
        if code < 0:
            raise error_of(failure_of(failure), self._where)
        return descriptors[0], descriptors[1]

    def take_port(self, port: VerbsPort) -> None:
        """Adds a port of RDMA, then the host's own; after ``share``, before ``start``."""
        failure = ffi.new("lc_failure *")
        number = lib.lc_host_verbs(self.handle, port.handle, failure)
        if number < 0:
            raise error_of(failure_of(failure), self._where)
        port.taken()
        self._verbs_link = number

    def out_of_band(self) -> OutOfBand:
        """Take out-of-band datagrams from now on; before ``start``, once."""
        descriptor = lib.lc_host_oob_open(self.handle)
        if descriptor < 0:
            raise error_of(Failure(descriptor), self._where)
        self._out_of_band = OutOfBand(self.handle, descriptor)
        return self._out_of_band

    def seal(self, secrets: bytes, filter_bits: int) -> None:
        """Seals all that leaves this machine; before ``start``.

        ``secrets``: :meth:`lossycoll.runtime.keys.secret.Secret.path_secrets`; empty: those of each
        process come with it (:meth:`admit`). ``filter_bits``: 16 bits, equal in all processes.
        """
        table = ffi.from_buffer("uint8_t[]", secrets) if secrets else ffi.NULL
        config = ffi.new("lc_seal_config *")
        config.cipher = CIPHERS[self._options.cipher]
        config.clear = self._options.seal == "authenticate"
        config.filter = filter_bits
        config.rekey_ns = math.ceil(self._options.rekey * 1e9)
        config.secrets = table
        failure = ffi.new("lc_failure *")
        if lib.lc_host_seal(self.handle, config, failure) < 0:
            raise error_of(failure_of(failure), self._where)
        self.is_sealed = True

    def show(self, job: Job) -> None:
        """Has the engine write a status page from now on; before ``start``."""
        page = StatusPage(self.process, job)
        code = lib.lc_host_page(self.handle, page.file)
        page.handed_over()
        if code < 0:
            page.close()
            raise OSError(f"{page.path} can't be mapped")
        self._page = page

    @property
    def page(self) -> Path | None:
        """Path of its status page; None: it has none."""
        return None if self._page is None else self._page.path

    def note_peer(self, process: int, state: int, heard: float) -> None:
        """Has the status page say what is known of another process. ``heard``: when it last said
        something, by time.monotonic(); 0: as known."""
        with self._lock:
            if self.handle != ffi.NULL and self._page is not None:
                lib.lc_host_page_peer(self.handle, process, state, int(heard * 1e9))

    def rekey(self) -> None:
        """New keys for what is sent from now on; nothing where nothing is sealed."""
        with self._lock:
            if self.handle != ffi.NULL:
                lib.lc_host_rekey(self.handle)

    def pulse(self, process: int) -> float:
        """Asks another process's engine for a sign of life, which it gives whatever Python does
        there: a call into C may hold the GIL for long.

        Returns when one last came, as of the call before, by time.monotonic(); 0: never.
        """
        with self._lock:
            if self.handle == ffi.NULL:
                return 0.0
            return int(lib.lc_host_pulse(self.handle, process)) * 1e-9

    def start(
        self,
        session: int,
        peers: Sequence[tuple[str, int] | None],
        topology: Topology | None = None,
        shared: Mapping[int, tuple[int, int]] | None = None,
        *,
        verbs: Mapping[int, VerbsAddress] | None = None,
        crowded: bool = False,
    ) -> None:
        """Makes the other processes known and starts the thread.

        ``session``: 64 bits, equal in all processes. ``peers``: (numeric host, port) of each
        process, this one included; None: it is to come (:meth:`admit`). ``topology``: which
        processes share a machine, and a site; None: none share a machine, and all a site.
        """
        nowhere = ffi.new("char[]", b"")  # one for all: of thousands of numbers, few are anybody's
        hosts = [ffi.new("char[]", peer[0].encode()) if peer else nowhere for peer in peers]
        table = ffi.new("lc_address[]", len(peers))
        sites = topology.sites if topology else (0,) * len(peers)
        for process, (entry, host, peer) in enumerate(zip(table, hosts, peers, strict=True)):
            entry.host = host
            entry.port = peer[1] if peer else 0
            entry.absent = peer is None
            entry.far = sites[process] != sites[self.process]
        for process, address in (verbs or {}).items():
            table[process].link = self._verbs_link
            address.write(table[process].verbs)
        for process, (memory, wake) in (shared or {}).items():
            entry = table[process]
            entry.link, entry.memory, entry.wake = SHARED_LINK, memory, wake
        self._session = session
        self.topology = topology or self.topology
        self.addresses = [place_text(*peer) if peer else "unknown" for peer in peers]
        for process, address in (verbs or {}).items():
            if process not in (shared or {}):
                self.addresses[process] = str(address)
        self._where = Where(self.process, self.processes, addresses=self.addresses)
        if crowded:
            lib.lc_host_crowded(self.handle)
        code = lib.lc_host_start(self.handle, session, table)
        if code < 0:
            raise error_of(Failure(code), self._where)

    def admit(self, process: int, peer: tuple[str, int] | None, secrets: bytes = b"") -> None:
        """Makes another process known by its number: one that comes, or comes back, or takes the
        place of one that has gone. At the other end the same must be done with this one.

        ``peer``: (numeric host, port); None: nobody has the number now.
        """
        address = ffi.NULL
        if peer is not None:
            host = ffi.new("char[]", peer[0].encode())
            address = ffi.new("lc_address *", {"host": host, "port": peer[1]})
        keys = ffi.from_buffer("uint8_t[]", secrets) if secrets else ffi.NULL
        code = lib.lc_host_admit(self.handle, process, address, keys)
        if code < 0:
            raise error_of(Failure(code, peer=process), self._where)
        self.addresses[process] = place_text(*peer) if peer else "unknown"

    def link(self, number: int = 0) -> LinkInfo:
        """Facts of a link: 0 is the socket, 1 the memory that is shared. Not after ``close``."""
        c = ffi.new("lc_link_info *")
        lib.lc_host_link(self.handle, number, c)
        return data_of(LinkInfo, c, active=fast_path_names(c.active))

    def link_to(self, processes: Sequence[int]) -> LinkInfo:
        """Facts of the socket, with payloads that the links between ``processes`` carry: those
        that share memory use it whatever the plans of their group are."""
        found = self.link()
        if self.topology.of_members(processes).shares_hosts:
            return replace(found, payload_bytes=min(found.payload_bytes, SHARED_PAYLOAD))
        return found

    def event(self) -> LinkEvent | None:
        """The oldest event of the link that nobody has taken, if there is one."""
        c = ffi.new("lc_event *")
        if not lib.lc_host_event(self.handle, c):
            return None
        return data_of(
            LinkEvent,
            c,
            kind=LinkEventKind(c.kind),
            errno=c.sys_errno,
            fast_path=",".join(fast_path_names(c.fast_path)),
            waited=c.waited_ns * 1e-9,
        )

    def claim(self, what: str) -> bool:
        """True once, for the first process of this machine (its network namespace) that asks for
        ``what``: so that one line of one process stands for all. Until that process's ``close``."""
        with self._lock:
            if what in self._claims or self._users == 0:
                return False
            held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                held.bind(f"\0lossycoll/{self._session:016x}/{what}")
            except OSError:
                held.close()
                self._claims[what] = None
                return False
            close_in_children(held)
            self._claims[what] = held
            return True

    @property
    def wakers(self) -> Wakers:
        with self._lock:
            if self.handle == ffi.NULL:
                raise ClosedError(f"{self._where}: the group was destroyed")
            if self._wakers is None:
                self._wakers = Wakers(self.handle)
            return self._wakers

    def hold(self) -> bool:
        """Counts one more user. Returns False if the host is closed."""
        with self._lock:
            if self._users == 0:
                return False
            self._users += 1
            return True

    def release(self) -> None:
        """One user less. The last one closes the host, after its groups."""
        if os.getpid() != self._pid:  # there the lock may be held, by a thread that it hasn't
            return
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.close()

    @property
    def address(self) -> int:
        """Address of the engine's host, for code that takes its turns."""
        return int(ffi.cast("uintptr_t", self.handle))

    @property
    def is_open(self) -> bool:
        """True if groups can be made on it."""
        return self._users > 0

    def close(self) -> None:
        """Joins the thread and frees everything, whoever uses it. Idempotent. A forked child has no
        thread to join, and leaves all as it is."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._users = 0
            handle, self.handle = self.handle, ffi.NULL
            self._wakers = None
            for held in filter(None, self._claims.values()):
                held.close()
        if self._out_of_band is not None:
            self._out_of_band.close()
        if handle != ffi.NULL:
            lib.lc_host_close(handle)
            if self._page is not None:
                self._page.close()


class OutOfBand:
    """Out-of-band datagrams by a host's socket, of which the engine believes nothing.

    A user that wants the engine's reflexive address, or to open a route through a NAT, has to send
    from this socket. Any thread may call.
    """

    def __init__(self, handle: Any, descriptor: int) -> None:
        self._handle = handle
        self._lock = threading.Lock()
        self._datagram = ffi.new("lc_oob_datagram *")
        self.descriptor = descriptor

    def say(self, place: Address, data: bytes) -> bool:
        """Sends one datagram; False where the system took nothing. A sent one may be lost later."""
        host = ffi.new("char[]", place[0].encode())
        address = ffi.new("lc_address *", {"host": host, "port": place[1]})
        with self._lock:
            if self._handle == ffi.NULL:
                return False
            return bool(lib.lc_host_say(self._handle, address, data, len(data)) == 0)

    def heard(self) -> tuple[Address, bytes] | None:
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


_closed_in_children: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()


def close_in_children(*sockets: socket.socket) -> None:
    """Has forked children close their copies of these sockets: an address would else stay taken
    after its owner's end, for as long as a child lives."""
    for one in sockets:
        _closed_in_children.add(one)


def _close_copies() -> None:
    for one in list(_closed_in_children):
        with contextlib.suppress(OSError):
            one.close()
    _closed_in_children.clear()


os.register_at_fork(after_in_child=_close_copies)


def step_functions() -> tuple[int, int, int]:
    """Addresses of lc_host_turn, lc_host_idle_ns and lc_group_wait: who has made the setting of a
    host takes its turns by these."""
    functions = ("lc_host_turn", "lc_host_idle_ns", "lc_group_wait")
    found = [int(ffi.cast("uintptr_t", ffi.addressof(lib, name))) for name in functions]
    return found[0], found[1], found[2]


def host_options(options: Options) -> tuple[object, ...]:
    """Values of the options that make a host: equal for groups that can share one."""
    return tuple(getattr(options, name) for name in HOST_OPTIONS)


def fast_path_names(bits: int) -> tuple[str, ...]:
    return tuple(name for i, name in enumerate(FAST_PATHS) if bits >> i & 1)


def failure_of(c: Any) -> Failure:
    said = {"errno": c.sys_errno, "mine": tuple(c.mine), "theirs": tuple(c.theirs)}
    return data_of(Failure, c, of_message=bool(c.of_message), **said)


def shared_bytes(processes: int) -> int:
    """Bytes of memory that a process may share with the others of ``processes``. No less than
    docs/shared-memory.md says; it is reserved when the memory is made."""
    return (12 << 20) + processes * (256 << 10)


def wire_version() -> int:
    """Version of the packets' form; ranks that differ in it can't hear each other."""
    return int(lib.lc_wire_version())


def version() -> str:
    return bytes(ffi.string(lib.lc_version())).decode()


def probe() -> tuple[str, ...]:
    """Fast paths that this processor and kernel offer, by name."""
    return fast_path_names(lib.lc_probe())
