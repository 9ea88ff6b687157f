"""What an installed lossycoll can do without torch: plans and the native engine.

Two engines in this process sum a vector over loopback, and the sum must be right. Prints one line.
Run it outside the source tree with the Python that lossycoll is installed for.
"""

from __future__ import annotations

import platform
import sys

import numpy as np

from lossycoll.options.fields import Options
from lossycoll.plan import Delivery, hierarchical
from lossycoll.runtime.engine import host as engine
from lossycoll.runtime.engine.binding import DType, EngineCall, EngineGroup
from lossycoll.runtime.engine.failures import Code
from lossycoll.runtime.engine.host import Host

WORLD = 2
COUNT = 50_000
PAYLOAD_BYTES = 1408
SECONDS = 60.0


def finish(one: EngineGroup, ticket: int) -> int:
    """The operation's code; the engine itself ends it after SECONDS."""
    while (code := one.wait(ticket, 1.0)) == Code.PENDING:
        pass
    one.release(ticket)
    return code


def main() -> None:
    options = Options()
    hosts = [
        Host(rank, WORLD, "127.0.0.1", payload_bytes=PAYLOAD_BYTES, options=options)
        for rank in range(WORLD)
    ]
    addresses = [("127.0.0.1", host.link().port) for host in hosts]
    for host in hosts:
        host.start(7, addresses)
    engines = [
        EngineGroup(host, rank, WORLD, number=1, fault_group=1, options=options)
        for rank, host in enumerate(hosts)
    ]
    arrays = [np.arange(COUNT, dtype=np.float32) * (rank + 1) for rank in range(WORLD)]
    want = np.sum(arrays, axis=0)
    tickets = []
    for rank, one in enumerate(engines):
        plan = hierarchical.all_reduce(WORLD, rank, COUNT, PAYLOAD_BYTES // 4)
        place = arrays[rank].ctypes.data
        call = EngineCall.of(plan).given(
            dtype=DType.F32,
            scale=float(WORLD),
            signature=plan.signature,
            timeout=SECONDS,
            delivery=Delivery(True),
        )
        tickets.append(one.submit(call, place, place))
    codes = [finish(one, ticket) for one, ticket in zip(engines, tickets, strict=True)]
    assert codes == [0] * WORLD, codes
    for array in arrays:
        np.testing.assert_array_equal(array, want)
    for one in engines:
        one.close()
    for host in hosts:
        host.close()
    assert "torch" not in sys.modules
    print(f"engine {engine.version()} under Python {platform.python_version()}, without torch: ok")


if __name__ == "__main__":
    main()
