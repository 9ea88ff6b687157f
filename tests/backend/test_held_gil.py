"""A call into C that holds the GIL for longer than a rank may be silent."""

from __future__ import annotations

import ctypes
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import init, run_good

LIVENESS = 1.0
HELD = 3 * LIVENESS
"""Seconds of sleep with the GIL, in a rank that the others hear nothing of meanwhile."""


def hold_the_gil(seconds: float) -> None:
    libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the GIL
    libc.usleep(int(seconds * 1e6))


def rank_holds_the_gil(rank: int, world: int) -> tuple[float, float]:
    """Returns how long a call took, and its result."""
    init()
    t = torch.ones(60_000)
    dist.all_reduce(t)
    dist.barrier()
    begin = time.monotonic()
    if rank == int(os.environ["HOLDS"]):
        hold_the_gil(HELD)
    for _ in range(3):
        dist.all_reduce(t.fill_(1))
    took = time.monotonic() - begin
    dist.barrier()
    dist.destroy_process_group()
    return took, float(t[0])


@pytest.mark.parametrize(("holds", "link"), [(0, "auto"), (2, "udp")])
def test_a_rank_that_holds_its_gil_for_long_is_waited_for(holds: int, link: str) -> None:
    env = {
        "LOSSYCOLL_LOG": "off",
        "LOSSYCOLL_LIVENESS": str(LIVENESS),
        "LOSSYCOLL_LINK": link,
        "HOLDS": str(holds),
    }
    for took, value in run_good(rank_holds_the_gil, 3, env):
        assert took >= HELD, "all were to wait for it"
        assert value == 3
