"""Two engines whose host loses the address of one of them in the middle of an operation, and gets
it back. A program: to be run in a network namespace of its own (tests/runtime/engine)."""

from __future__ import annotations

import errno
import subprocess
import time

import numpy as np

from lossycoll.plan import ring
from lossycoll.runtime.engine.link_events import LinkEvent, LinkEventKind
from tests.support.network import Network
from tests.support.waiting import until

GONE = "10.99.0.1"
COUNT = 400_000


def ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)


def main() -> None:
    ip("link set lo up")
    ip(f"address add {GONE}/32 dev lo")
    with Network(2, address=lambda rank: (GONE, "127.0.0.1")[rank]) as net:
        plans = [ring.all_reduce(2, rank, COUNT, 352) for rank in range(2)]
        data = [np.full(COUNT, rank + 1, np.float32) for rank in range(2)]
        ip(f"address del {GONE}/32 dev lo")
        tickets = [
            net.submit(rank, plans[rank], (data[rank], data[rank]), "f32", 2.0, reliable=True)
            for rank in range(2)
        ]
        found: list[LinkEvent] = []

        def seen(kind: LinkEventKind) -> bool:
            while (event := net.engines[0].event()) is not None:
                found.append(event)
            return any(event.kind == kind for event in found)

        until(lambda: seen(LinkEventKind.FAILING), "the address is missed")
        time.sleep(0.3)
        assert net.engines[0].wait(tickets[0], 0.0) == 1, "it ended without the network"
        ip(f"address add {GONE}/32 dev lo")
        for rank, ticket in enumerate(tickets):
            ended = net.end(rank, ticket)
            assert (ended.code, ended.report.packets_missing) == (0, 0), ended
            assert ended.report.elapsed > 0.3
            np.testing.assert_array_equal(data[rank], np.full(COUNT, 3, np.float32))
        until(lambda: seen(LinkEventKind.WORKS), "it is told that all is well")
        first, last = found[0], found[-1]
        assert (first.errno, first.peer) == (errno.EADDRNOTAVAIL, -1), found
        assert last.waited > 0.3, found
        assert net.engines[0].stats().send_failures > 1


if __name__ == "__main__":
    main()
