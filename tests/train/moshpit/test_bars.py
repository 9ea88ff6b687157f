"""Full grids of processes that wait for one another: exact, however they begin."""

from __future__ import annotations

import subprocess
from typing import Final

import pytest

from tests.support.harness import warm_python

PEER: Final = """
import sys, torch, lossycoll
number, count, shape, order, seed = sys.argv[1:]
number, count = int(number), int(count)
grid = tuple(map(int, shape.split("x")))
joins = [] if seed == "-" else [seed]
with lossycoll.Swarm("127.0.0.1:0", joins, name=str(number), timeout=60.0) as swarm:
    print(swarm.address, flush=True)
    if order == "swarm waits":
        swarm.wait_for(count, timeout=60)
    values = torch.full((1000,), float(2**number))
    averager = lossycoll.MoshpitAverager(swarm, [values], grid=grid)
    if order == "averager waits":
        averager.wait_for(count, timeout=60)
    reports = [averager.step(timeout=30) for _ in grid]
    off = float((values - (2**count - 1) / count).abs().max())
    wrong = [one for one in reports if one.failure or one.absent or one.missing or one.kept]
    print(off, wrong if off < 1e-3 else reports)
"""


def started(number: int, count: int, shape: str, order: str, seed: str) -> subprocess.Popen[str]:
    command = [warm_python(), "-c", PEER, str(number), str(count), shape, order, seed]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.long
@pytest.mark.parametrize(("shape", "count", "starts"), [("2x2x2", 8, 10), ("4x4", 16, 10)])
@pytest.mark.parametrize("order", ["swarm waits", "averager waits"])
def test_bars_are_exact(shape: str, count: int, starts: int, order: str) -> None:
    for _ in range(starts):
        peers = [started(0, count, shape, order, "-")]
        try:
            assert peers[0].stdout is not None
            seed = peers[0].stdout.readline().strip()
            peers += [started(n, count, shape, order, seed) for n in range(1, count)]
            said = [peer.communicate(timeout=120)[0].splitlines()[-1] for peer in peers]
        finally:
            for peer in peers:
                peer.kill()
                peer.wait()
        for one in said:
            off, _, rest = one.partition(" ")
            assert rest == "[]", said
            assert float(off) < 1e-3, said
