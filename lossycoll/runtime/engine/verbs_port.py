"""A port of RDMA with a queue pair, before a host takes it; and what keeps one from being opened.

The engine opens libibverbs at run time; docs/rdma.md has the whole.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import resource
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lossycoll._native import ffi, lib
from lossycoll.errors import EngineError


class VerbsAddress(NamedTuple):
    """lc_verbs_address: what other processes need to know of a port. ``gid`` in hexadecimal
    digits."""

    gid: str
    queue_pair: int
    key: int
    lid: int
    partition: int

    @classmethod
    def from_json(cls, said: Sequence[Any]) -> VerbsAddress:
        gid, *numbers = said
        if len(bytes.fromhex(gid)) != 16:
            raise ValueError(f"a GID has 16 bytes, not {gid!r}")
        queue_pair, key, lid, partition = (int(number) for number in numbers)
        limits = zip((queue_pair, key, lid, partition), (24, 32, 16, 16), strict=True)
        if not all(0 <= number < 1 << bits for number, bits in limits):
            raise ValueError(f"no address of a queue pair: {said!r}")
        return cls(gid, queue_pair, key, lid, partition)

    def __str__(self) -> str:
        address = ipaddress.IPv6Address(bytes.fromhex(self.gid))
        return f"RDMA {address.ipv4_mapped or address} queue pair {self.queue_pair:#x}"

    def write(self, into: Any) -> None:
        into.gid = bytes.fromhex(self.gid)
        into.queue_pair, into.key = self.queue_pair, self.key
        into.lid, into.partition = self.lid, self.partition


class VerbsPort:
    """One process's queue pair.

    ``gid``: index of the address by which others reach it. ``counters``: the folder of the port's
    own counters; empty: it has none. ``library``: path of libibverbs; empty: the system's.
    """

    def __init__(
        self, device: str, number: int, gid: int, *, counters: str = "", library: str = ""
    ) -> None:
        texts = [ffi.new("char[]", text.encode()) for text in (library, device, counters)]
        config = ffi.new("lc_verbs_config *", {"port": number, "gid": gid})
        config.library = texts[0] if library else ffi.NULL
        config.device = texts[1]
        config.counters = texts[2] if counters else ffi.NULL
        info, failure = ffi.new("lc_verbs_info *"), ffi.new("lc_failure *")
        self.name = f"{device}:{number}"
        self._known = 1
        self.handle: Any = lib.lc_verbs_open(config, info, failure)
        if self.handle == ffi.NULL:
            raise _refusal(self.name, gid, failure)
        self.mtu = int(info.mtu)
        """Bytes of a datagram."""
        self.queue = int(info.queue)
        """Datagrams that may wait here, and those that were to: less may be locked, maybe."""
        self.queue_wanted = int(info.queue_of)
        own = info.address
        self.address = VerbsAddress(
            bytes(own.gid).hex(), own.queue_pair, own.key, own.lid, own.partition
        )

    def know(self, own: int, addresses: Mapping[int, VerbsAddress]) -> None:
        """Finds the ways to other processes, before they are greeted. It may take seconds, where
        some don't answer."""
        self._known = max([own, *addresses]) + 1
        table = ffi.new("lc_verbs_address[]", self._known)
        for number, address in addresses.items():
            address.write(table[number])
        if lib.lc_verbs_know(self.handle, own, table, self._known) < 0:
            raise EngineError(f"{self.name}: no memory for the ways to {len(addresses)} others")

    def greet(self, token: int, own: int, size: int, seconds: float) -> set[int]:
        """The known processes that are reached, while they ask the same.

        ``token``: 64 bits, of this meeting alone. ``size``: bytes of a greeting: as many as packets
        will have. Greetings of others count if they have as many.
        """
        heard = ffi.new("uint8_t[]", self._known)
        code = lib.lc_verbs_greet(
            self.handle, token, own, self._known, size, int(seconds * 1e9), heard
        )
        if code < 0:
            raise EngineError(f"{self.name}: a greeting of {size} bytes can't be", code=code)
        return {number for number in range(self._known) if heard[number]}

    def drop_arrived(self) -> None:
        """Late greetings: once all others have ended theirs, and before they send anything else."""
        lib.lc_verbs_drop_arrived(self.handle)

    def taken(self) -> Any:
        """The handle, for the host that takes it: from then on it is the host's."""
        handle, self.handle = self.handle, ffi.NULL
        return handle

    def close(self) -> None:
        """Idempotent; nothing where a host has taken it."""
        handle = self.taken()
        if handle != ffi.NULL:
            lib.lc_verbs_close(handle)


def memory_limit() -> str:
    """Memory that this process may lock, as a person reads it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "no limit" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"


def _refusal(name: str, gid: int, failure: Any) -> EngineError:
    number, step = int(failure.sys_errno), int(failure.mine[0])
    remedies = {
        lib.LC_VERBS_LIBRARY: "there is no libibverbs: install libibverbs1 and ibverbs-providers "
        "(Debian, Ubuntu) or rdma-core",
        lib.LC_VERBS_DEVICE: "libibverbs doesn't know the device: install its provider "
        "(ibverbs-providers, or rdma-core) and load ib_uverbs; give a container /dev/infiniband",
        lib.LC_VERBS_OPEN: "it can't be opened: give this user /dev/infiniband/uverbs*, in a "
        "container too (--device=/dev/infiniband)",
        lib.LC_VERBS_PORT: "its port has no link: see `rdma link` and `ip link`",
        lib.LC_VERBS_GID: f"it has no GID {gid}: see LOSSYCOLL_VERBS_GID",
        lib.LC_VERBS_MEMORY: f"its buffers can't be locked (the limit is {memory_limit()}): raise "
        "it by `ulimit -l`, LimitMEMLOCK= of systemd, or --ulimit memlock=-1 of a container",
        lib.LC_VERBS_QUEUES: "no queue pair is to be had",
    }
    why = remedies.get(step, "the engine is out of memory")
    reason = os.strerror(number) if number else "no reason given"
    if step == lib.LC_VERBS_LIBRARY:
        reason = os.strerror(errno.ENOENT)
    return EngineError(f"{name}: {why} ({reason})", code=int(failure.code), errno=number)
