"""Engines that share memory: several in one process, or each in a process of its own.

As a program it is one rank of a job whose ranks share memory: see :func:`main`.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from lossycoll._native import ffi, lib

from lossycoll.errors import LinkError
from lossycoll.options.fields import Options
from lossycoll.plan import Delivery, Plan, hierarchical
from lossycoll.runtime.engine.binding import DType, EngineCall, EngineGroup
from lossycoll.runtime.engine.failures import Code, Where, error_of
from lossycoll.runtime.engine.host import Host
from tests.oracle.codec import Array
from tests.support.network import GROUP, SESSION, Network

PAYLOAD = 1408
"""Of UDP, which is there beside it."""
SHARED = 65024
"""LC_SHARED_PAYLOAD"""
LINK = 1

Descriptors = tuple[int, int]
"""A process's memory, and what wakes it."""


def share(host: Host, sharing: Sequence[int]) -> Descriptors:
    """Opens the link to the processes that share memory, this one among them."""
    found, failure = ffi.new("int[2]"), ffi.new("lc_failure *")
    code = lib.lc_host_share(host.handle, list(sharing), len(sharing), found, failure)
    assert code == Code.OK, (code, failure.sys_errno)
    return found[0], found[1]


def start(
    host: Host, addresses: Sequence[tuple[str, int]], shared: Mapping[int, Descriptors]
) -> int:
    """``shared``: what reaches the processes that don't go by UDP. Returns the engine's code."""
    names = [ffi.new("char[]", name.encode()) for name, _ in addresses]
    table = ffi.new("lc_address[]", len(addresses))
    for process, (name, (_, port)) in enumerate(zip(names, addresses, strict=True)):
        table[process].host = name
        table[process].port = port
        if process in shared:
            table[process].link = LINK
            table[process].memory, table[process].wake = shared[process]
    return int(lib.lc_host_start(host.handle, SESSION, table))


class SharedNetwork(Network):
    """A network whose ranks ``sharing`` (all, if not given) share memory; the others go by UDP."""

    def __init__(self, world: int, sharing: Sequence[int] = (), **options: object) -> None:
        self.sharing = list(sharing or range(world))
        super().__init__(world, PAYLOAD, **options)  # type: ignore[arg-type]

    def start(self, addresses: list[tuple[str, int]]) -> None:
        found = {rank: share(self.hosts[rank], self.sharing) for rank in self.sharing}
        for rank, host in enumerate(self.hosts):
            others = {peer: found[peer] for peer in self.sharing if peer != rank}
            assert start(host, addresses, others if rank in found else {}) == Code.OK


# ---- a rank in a process of its own ----


class Rank:
    """One rank of a world whose ranks share memory. ``wires``: a socket to each other rank."""

    def __init__(
        self, rank: int, world: int, wires: Mapping[int, socket.socket], **options: object
    ) -> None:
        self.rank, self.world = rank, world
        chosen = Options(**options)  # type: ignore[arg-type]
        self.host = Host(rank, world, "127.0.0.1", payload_bytes=PAYLOAD, options=chosen)
        own = share(self.host, range(world))
        addresses = [("127.0.0.1", self.host.link().port)] * world
        shared: dict[int, Descriptors] = {}
        for wire in wires.values():
            socket.send_fds(wire, [pickle.dumps(addresses[rank])], list(own))
        for peer, wire in wires.items():
            told, found, _, _ = socket.recv_fds(wire, 1000, 2)
            addresses[peer], shared[peer] = pickle.loads(told), (found[0], found[1])
        assert start(self.host, addresses, shared) == Code.OK
        for pair in shared.values():
            for fd in pair:
                os.close(fd)
        self.engine = EngineGroup(
            self.host, rank, world, number=GROUP, fault_group=GROUP, options=chosen, met=True
        )
        self.ticket = 0

    def run(self, plan: Plan, into: Array, out: Array, scale: float = 1.0) -> None:
        """A reliable call of float32. Raises what it fails with."""
        call = EngineCall.of(plan).given(
            dtype=DType.F32,
            scale=scale,
            signature=plan.signature,
            timeout=60.0,
            delivery=Delivery(True),
            waits=True,
            lingers=True,
        )
        self.wait(self.engine.submit(call, into.ctypes.data, out.ctypes.data))

    def post(self, data: Array, peer: int, *, receive: bool) -> int:
        """A message of bytes with tag 0. Returns its ticket; 0: it is done."""
        return self.engine.post(
            self,
            data.ctypes.data,
            60.0,
            elements=data.nbytes,
            element_bytes=1,
            peer=peer,
            receive=receive,
        )

    def wait(self, ticket: int) -> None:
        """Raises what the operation failed with."""
        if not ticket:
            return
        while self.engine.wait(ticket, 0.1) == Code.PENDING:
            pass
        _, failure = self.engine.result(ticket)
        self.engine.release(ticket)
        if failure.code != Code.OK:
            raise error_of(failure, Where(self.rank, self.world))

    def close(self) -> None:
        self.engine.close()
        self.host.close()


def launch(world: int, role: str, *arguments: str) -> list[subprocess.Popen[bytes]]:
    """Starts a process for each rank; :data:`ROLES` says what it does."""
    pairs = {(a, b): socket.socketpair() for a in range(world) for b in range(a + 1, world)}
    started = []
    for rank in range(world):
        ends = {b if a == rank else a: pair[a != rank] for (a, b), pair in pairs.items()
                if rank in (a, b)}  # fmt: skip
        fds = [end.fileno() for end in ends.values()]
        wires = ",".join(f"{peer}:{end.fileno()}" for peer, end in ends.items())
        command = [sys.executable, "-m", __name__, role, str(rank), str(world), wires, *arguments]
        started.append(subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE))
    for pair in pairs.values():
        for end in pair:
            end.close()
    return started


def reduce_many(rank: Rank, elements: int, times: int) -> None:
    """Means of what differs from call to call, each checked."""
    plan = hierarchical.all_reduce(rank.world, rank.rank, elements, SHARED // 4)
    base = np.arange(elements, dtype=np.float32) % 64
    for i in range(times):
        data = base * (rank.rank + 1) + i
        rank.run(plan, data, data)
        np.testing.assert_array_equal(data, base * ((rank.world + 1) / 2) + i)


def exact(rank: Rank) -> None:
    for elements, times in ((1, 50), (1000, 50), (100_003, 10), (3_000_000, 2)):
        reduce_many(rank, elements, times)


def messages(rank: Rank) -> None:
    """Sizes around packets' and the limit of what is sent ahead, from everyone to everyone, into
    receives from a rank and from any."""
    for size in (0, 1, SHARED - 32, SHARED, 65536, 65537, 1_000_003):
        expected = {peer: np.arange(size, dtype=np.uint32).astype(np.uint8) ^ np.uint8(peer)
                    for peer in range(rank.world)}  # fmt: skip
        others = [peer for peer in range(rank.world) if peer != rank.rank]
        for source in (0, -1):
            got = [np.zeros(size, np.uint8) for _ in others]
            tickets = [
                rank.post(into, peer if source == 0 else -1, receive=True)
                for into, peer in zip(got, others, strict=True)
            ]
            tickets += [rank.post(expected[rank.rank], peer, receive=False) for peer in others]
            for ticket in tickets:
                rank.wait(ticket)
            want = sorted(expected[peer].tobytes() for peer in others)
            assert sorted(into.tobytes() for into in got) == want, (size, source)
            reduce_many(rank, 10, 1)  # so nobody is ahead by a round


def killed(rank: Rank) -> None:
    """The last rank is killed in the middle of a large call; prints what the others raise."""
    if rank.rank == rank.world - 1:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    try:
        reduce_many(rank, 6_000_000, 1000)
    except LinkError as error:
        print(error, flush=True)


def stopped(rank: Rank) -> None:
    """The last rank stops for a while in the middle; its parent lets it go on."""
    if rank.rank == rank.world - 1:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    reduce_many(rank, 500_000, 60)


ROLES: dict[str, tuple[Callable[[Rank], None], dict[str, Any]]] = {
    "exact": (exact, {}),
    "messages": (messages, {}),
    "killed": (killed, {"deadline_max": 1.0, "deadline_min": 0.5, "liveness": 0.5}),
    "stopped": (stopped, {}),
}


def main(role: str, rank: str, world: str, wires: str) -> None:
    """One rank: its role, number, the world's size, and the sockets to the others (peer:fd,...)."""
    does, options = ROLES[role]
    sockets = {
        int(peer): socket.socket(fileno=int(fd))
        for peer, fd in (pair.split(":") for pair in wires.split(","))
    }
    me = Rank(int(rank), int(world), sockets, **options)
    does(me)
    me.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
