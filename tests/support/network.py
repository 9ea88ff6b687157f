"""Several ranks' engines in one process, joined by real sockets on loopback.

The engines do not know it: each has its own socket and progress thread, as in a job of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from lossycoll.options.fields import Options
from lossycoll.plan import Delivery, Plan, sets
from lossycoll.runtime.engine.binding import DType, EngineCall, EngineGroup
from lossycoll.runtime.engine.failures import Code, Failure
from lossycoll.runtime.engine.host import Host
from lossycoll.runtime.engine.reports import Report
from tests.oracle.codec import Array

GROUP = 3
SESSION = 0x5EED5EED
DTYPES = {
    "f32": DType.F32,
    "f64": DType.F64,
    "f16": DType.F16,
    "bf16": DType.BF16,
    "bytes": DType.BYTES,
}


@dataclass
class Ended:
    """One rank's outcome of one operation."""

    code: int
    report: Report
    failure: Failure


class Network:
    """``world`` engines on loopback. ``op`` counts the operations, as each engine does.
    ``submitting``: the ranks, in the order in which they submit each."""

    def __init__(
        self,
        world: int,
        payload_bytes: int = 1408,
        address: Callable[[int], str] = lambda rank: "127.0.0.1",
        **options: object,
    ) -> None:
        self.address = address
        given = {"deadline_min": 60.0, "deadline_max": 60.0, **options}
        self.world = world
        self.payload_bytes = payload_bytes
        self.options = Options(**given)  # type: ignore[arg-type]
        self.hosts = [
            Host(rank, world, address(rank), payload_bytes=payload_bytes, options=self.options)
            for rank in range(world)
        ]
        self.start(self.introduce([host.link().port for host in self.hosts]))
        self.engines = [
            EngineGroup(
                host, rank, world, number=GROUP, fault_group=GROUP, options=self.options, met=True
            )
            for rank, host in enumerate(self.hosts)
        ]
        self.op = 0
        self.submitting: Sequence[int] = range(world)

    def start(self, addresses: list[tuple[str, int]]) -> None:
        """Makes the engines known to each other."""
        for host in self.hosts:
            host.start(SESSION, addresses)

    def introduce(self, ports: list[int]) -> list[tuple[str, int]]:
        """The addresses by which the engines know each other, by rank."""
        return [(self.address(rank), port) for rank, port in enumerate(ports)]

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for engine in self.engines:
            engine.close()
        for host in self.hosts:
            host.close()

    def submit(
        self,
        rank: int,
        plan: Plan,
        buffers: tuple[Array, Array],
        dtype: str,
        scale: float = 1.0,
        *,
        reliable: bool = False,
        repair: int = 0,
        timeout: float = 60.0,
        weights: Array | None = None,
        divisor: float = 1.0,
        needed: bytes | None = None,
        feedback: bool = False,
        code: sets.Code = sets.NO_PARITY,
        most_parity: int = 0,
        choose_rounds: bool = False,
        max_missing: float = -1.0,
        encoding: str = "same",
        keeps_sums: bool = False,
        deterministic: bool = False,
    ) -> int:
        """``weights``: (receiver, sender). ``needed``: as EngineCall's; None: not selective."""
        into, out = buffers
        call = EngineCall.of(plan).given(
            dtype=DTYPES[dtype],
            scale=scale,
            signature=plan.signature,
            timeout=timeout,
            delivery=Delivery(reliable, repair, code, most_parity, choose_rounds, max_missing),
            weights=() if weights is None else weights[rank].tolist(),
            divisor=divisor,
            selective=needed is not None,
            needed=needed or b"",
            feedback=feedback,
            encoding=encoding,
            keeps_sums=keeps_sums,
            deterministic=deterministic,
        )
        return self.engines[rank].submit(call, into.ctypes.data, out.ctypes.data)

    def end(
        self,
        rank: int,
        ticket: int,
        seconds: float = 60.0,
        note: Callable[[int], None] | None = None,
    ) -> Ended:
        """Waits for an operation; fails the test if it doesn't end in time. ``note``: is given the
        ticket before the engine forgets it."""
        engine = self.engines[rank]
        for _ in range(max(1, int(seconds / 0.1))):
            code = engine.wait(ticket, 0.1)
            if code != Code.PENDING:
                report, failure = engine.result(ticket)
                if note is not None:
                    note(ticket)
                engine.release(ticket)
                return Ended(code, report, failure)
        raise AssertionError(f"rank {rank}: the operation did not end within {seconds} s")

    def run(
        self,
        plans: Sequence[Plan],
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        dtype: str,
        scale: float = 1.0,
        **how: object,
    ) -> list[Ended]:
        """One collective on all ranks."""
        tickets = {
            rank: self.submit(rank, plans[rank], (inputs[rank], outputs[rank]), dtype, scale, **how)  # type: ignore[arg-type]
            for rank in self.submitting
        }
        self.op += 1
        return [self.end(rank, tickets[rank]) for rank in range(self.world)]


def elements(dtype: str, count: int, rng: np.random.Generator) -> Array:
    """Random data of a wire type: small multiples of 1/8, so that values are exact in each."""
    if dtype == "bytes":
        return rng.integers(0, 256, count, dtype=np.uint8)
    values = rng.integers(-16, 17, count).astype(np.float32) / 8
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype({"f32": np.float32, "f64": np.float64, "f16": np.float16}[dtype])
