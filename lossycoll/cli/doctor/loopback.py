"""Self-tests over the loopback interface: do packets arrive, and how fast."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lossycoll.runtime.engine.binding import Engine

SECONDS = 0.3
DATAGRAM = 8192
PAYLOAD = 1400  # fits every interface's packets
ELEMENTS = 1 << 18
SESSION = 0x10551C0
PATIENCE = 10.0


def udp_loopback() -> str:
    """One datagram at a time, there and read at once: the bare sockets, without the engine."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
    ):
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(1.0)
        sender.connect(receiver.getsockname())
        payload = bytes(range(256)) * (DATAGRAM // 256)
        count = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < SECONDS:
            sender.send(payload)
            if receiver.recv(DATAGRAM + 1) != payload:
                raise RuntimeError(f"datagram {count} arrived with other contents")
            count += 1
    rate = count * DATAGRAM / elapsed / 1e9
    return f"{count} datagrams of {DATAGRAM} bytes, none lost, {rate:.2f} GB/s"


def engine_loopback() -> str:
    """Two engines of this process all-reduce with each other; the sum is checked."""
    import numpy as np

    from lossycoll.options.fields import Options
    from lossycoll.plan import draw_order, transpose
    from lossycoll.runtime.engine.binding import Call, DType, Encoded, Engine

    options = Options()  # the defaults: what the environment injects is not the network's fault
    address = "127.0.0.1"
    engines: list[Engine] = []
    try:
        for rank in range(2):
            engines.append(
                Engine(rank, 2, address, payload_bytes=PAYLOAD, group=0, options=options)
            )
        peers = [(address, engine.link().port) for engine in engines]
        for engine in engines:
            engine.start(SESSION, peers)
        given = [np.arange(ELEMENTS, dtype=np.float32) % 1000 + rank for rank in range(2)]
        wanted = given[0] + given[1]
        missing = operations = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < SECONDS:
            tensors = [values.copy() for values in given]
            tickets = []
            for rank, (engine, tensor) in enumerate(zip(engines, tensors, strict=True)):
                order = draw_order(0, 0, operations, 2)
                plan = transpose.all_reduce(2, rank, ELEMENTS, PAYLOAD // 4, order=order)
                call = Call(
                    input=tensor.ctypes.data,
                    output=tensor.ctypes.data,
                    dtype=DType.F32,
                    scale=2.0,
                    signature=plan.signature,
                    timeout=PATIENCE,
                    reliable=False,
                    repair=0,
                    notify=False,
                )
                tickets.append(engine.submit(Encoded.of(plan), call))
            for engine, ticket, tensor in zip(engines, tickets, tensors, strict=True):
                missing += _finish(engine, ticket)
                if not missing and not np.array_equal(tensor, wanted):
                    raise RuntimeError("two engines all-reduced to a wrong sum")
            operations += 1
        active = ",".join(engines[0].link().active) or "none"
    finally:
        for engine in engines:
            engine.close()
    rate = operations * ELEMENTS * 4 / elapsed / 1e9
    return f"{operations} all-reduces of 1 MiB, {missing} packets lost, {rate:.2f} GB/s ({active})"


def _finish(engine: Engine, ticket: int) -> int:
    """Waits for an operation; returns how many packets it missed, or raises why it failed."""
    from lossycoll.errors import Code

    until = time.monotonic() + PATIENCE
    while (code := engine.wait(ticket, 0.1)) == Code.PENDING:
        if time.monotonic() > until:
            raise RuntimeError(f"two engines did not finish an all-reduce in {PATIENCE:g} s")
    report, failure = engine.result(ticket)
    engine.release(ticket)
    if code < 0:
        raise RuntimeError(f"an all-reduce between two engines failed: {failure}")
    return report.packets_missing
