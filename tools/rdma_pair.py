"""Two processes, each a rank with a device of RDMA of its own, and an engine over a link.

They share one machine, and nothing but a pipe, by which they exchange addresses. No torch.
"""

from __future__ import annotations

import multiprocessing
import secrets
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lossycoll.options.fields import Options
from lossycoll.plan import Delivery, Plan
from lossycoll.runtime.engine.binding import DType, EngineCall, EngineGroup
from lossycoll.runtime.engine.failures import Code, Failure
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.engine.payload import datagram_payload
from lossycoll.runtime.engine.reports import Report
from lossycoll.runtime.engine.verbs_port import VerbsAddress, VerbsPort
from lossycoll.runtime.net.rdma_ports import ROUTABLE, ChosenPort, ports

ADDRESSES: Final = ("10.9.0.1", "10.9.0.2")
"""By rank."""
INTERFACES: Final = ("va", "vb")
"""They have these addresses, and a device each."""
WORLD: Final = len(ADDRESSES)
GROUP: Final = 3
SESSION: Final = 0x5EED5EED
GREETING_S: Final = 10.0
PATIENCE_S: Final = 120.0
"""Longer than any step of the other one takes."""

Floats = NDArray[np.float32]
Task = Callable[["Peer"], dict[str, Any]]


class Peer:
    """This process's number, and its way to the other one."""

    def __init__(self, rank: int, pipe: connection.Connection) -> None:
        self.rank = rank
        self.pipe = pipe

    @property
    def other(self) -> int:
        return 1 - self.rank

    def swap(self, said: Any) -> Any:
        """Says something, and returns what the other one says; so it waits for it, too."""
        self.pipe.send(said)
        if not self.pipe.poll(PATIENCE_S):
            raise TimeoutError(f"rank {self.other} says nothing for {PATIENCE_S:g} s")
        return self.pipe.recv()

    def agree(self, mine: Any) -> Any:
        """What rank 0 says."""
        theirs = self.swap(mine)
        return mine if self.rank == 0 else theirs


@lru_cache
def chosen_port(rank: int) -> ChosenPort:
    """The port whose device stands on the rank's interface, and its routable GID.

    Asked for once, before there are ranks: a soft device's table has 1,024 entries, and in a guest
    it takes seconds to read them.
    """
    have = ports()
    for port in have:
        for gid in port.gids:
            if gid.kind == ROUTABLE and gid.plain == ADDRESSES[rank]:
                return ChosenPort(port, gid)
    listed = [f"{port}: {', '.join(map(str, port.gids))}" for port in have]
    raise LookupError(f"no port has a GID of {ROUTABLE} with {ADDRESSES[rank]}: {listed}")


def counters(rank: int) -> dict[str, int]:
    """What the rank's device counts."""
    folder = Path(chosen_port(rank).port.counters)
    return {path.name: int(path.read_text()) for path in sorted(folder.iterdir())}


class End:
    """A rank's engine over one link."""

    def __init__(
        self, peer: Peer, *, udp: bool = False, payload_bytes: int = 0, **options: object
    ) -> None:
        self.peer = peer
        self.options = Options(**options)  # type: ignore[arg-type]
        chosen = chosen_port(peer.rank)
        verbs = VerbsPort(
            chosen.port.device, chosen.port.number, chosen.gid.index, counters=chosen.port.counters
        )
        self.payload_bytes = payload_bytes or datagram_payload(verbs.mtu)
        self.mtu, self.queue = verbs.mtu, verbs.queue
        self.host = Host(
            peer.rank,
            WORLD,
            ADDRESSES[peer.rank],
            payload_bytes=self.payload_bytes,
            options=self.options,
        )
        sockets = [self.host.link().port] * WORLD
        sockets[peer.other] = peer.swap(sockets[peer.rank])
        addresses = list(zip(ADDRESSES, sockets, strict=True))
        if udp:
            verbs.close()
            self.host.start(SESSION, addresses)
        else:
            there = self._meet(verbs)
            self.host.take_port(verbs)
            self.host.start(SESSION, addresses, verbs={peer.other: there})
        self.engine = EngineGroup(
            self.host, peer.rank, WORLD, number=GROUP, fault_group=GROUP, options=self.options
        )
        peer.swap("has the group")

    def _meet(self, verbs: VerbsPort) -> VerbsAddress:
        """The other one's address, once a datagram has come from there."""
        there = VerbsAddress.from_json(self.peer.swap(list(verbs.address)))
        token = self.peer.agree(secrets.randbits(64))
        begin = time.monotonic()
        verbs.know(self.peer.rank, {self.peer.other: there})
        heard = verbs.greet(token, self.peer.rank, verbs.mtu, GREETING_S)
        if heard != {self.peer.other}:
            raise ConnectionError(f"no greeting came from {there} within {GREETING_S:g} s")
        self.peer.swap("has greeted")
        verbs.drop_arrived()
        print(f"rank {self.peer.rank}: greeted for {time.monotonic() - begin:.2f} s", flush=True)
        return there

    def call(self, plan: Plan, *, reliable: bool) -> EngineCall:
        """A mean that can be taken any number of times."""
        return EngineCall.of(plan).given(
            dtype=DType.F32,
            signature=plan.signature,
            timeout=PATIENCE_S,
            delivery=Delivery(reliable),
        )

    def submit(self, call: EngineCall, array: Floats) -> int:
        """In place. The caller keeps the array."""
        place = array.ctypes.data
        return self.engine.submit(call, place, place, _Owner())

    def end(self, ticket: int) -> tuple[Report, Failure]:
        """What an operation did; the engine itself ends it after PATIENCE_S."""
        while self.engine.wait(ticket, 1.0) == Code.PENDING:
            pass
        found = self.engine.result(ticket)
        self.engine.release(ticket)
        return found

    def settled(self) -> dict[str, int]:
        """The engine's sums over all operations, and the end of it."""
        self.peer.swap("is done")
        time.sleep(0.3)  # an idle engine writes them every 100 ms
        found = asdict(self.engine.stats())
        self.peer.swap("wants no packet any more")
        self.close()
        return found

    def close(self) -> None:
        self.engine.close()
        self.host.close()


class _Owner:
    """What the engine tells the ticket to; nobody else asks here."""

    ticket = 0


def both(task: Task, seconds: float) -> list[dict[str, Any]]:
    """Runs a task in two processes, forked from this one."""
    context = multiprocessing.get_context("fork")
    pipes = context.Pipe()
    ranks = []
    for rank in range(WORLD):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(task, rank, pipes, there), daemon=True)
        process.start()
        there.close()
        ranks.append((process, here))
    for pipe in pipes:
        pipe.close()
    until = time.monotonic() + seconds
    found = [_said(process, here, until) for process, here in ranks]
    for process, _ in ranks:
        process.kill()
        process.join()
    return found


def _run(
    task: Task, rank: int, pipes: tuple[connection.Connection, ...], tell: connection.Connection
) -> None:
    # This end of the other one's must close with the other one.
    pipes[1 - rank].close()
    try:
        found = {**task(Peer(rank, pipes[rank])), "torch": "torch" in sys.modules}
    except BaseException:  # whatever it is, it is the result
        found = {"error": traceback.format_exc()}
    tell.send(found)


def _said(process: BaseProcess, here: connection.Connection, until: float) -> dict[str, Any]:
    try:
        if here.poll(max(0.0, until - time.monotonic())):
            found: dict[str, Any] = here.recv()
            return found
    except EOFError:
        process.join()
        return {"error": f"ended with {process.exitcode}"}
    return {"error": "took too long"}
