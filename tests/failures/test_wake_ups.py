"""Who waits is woken: timers would cover a wake-up that is lost, and only make it late.

So each way of waiting is compared with a plain socket between the same two processes: its peer is
late by a few milliseconds, and what is measured is the time from the peer's call to the result. Or
both compute meanwhile, as training does, and call at the same moment.
"""

from __future__ import annotations

import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.harness import init, run_good

ROUNDS, TIMES = 4, 7
"""The best of so many medians counts: a busy machine is late at times, a lost wake-up always."""
LATE = 0.004
"""Seconds: until then all threads of the rank that waits are asleep."""
MOST = 40.0
"""Times the socket's. Timers cover a lost wake-up after 20 to 100 ms: a hundred times as long."""


def echo(rank: int) -> tuple[socket.socket, Any]:
    """A socket of this rank, and the address of the other's."""
    import torch.distributed as dist

    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    own.bind(("127.0.0.1", 0))
    store = dist.distributed_c10d._get_default_store()
    store.set(f"port{rank}", str(own.getsockname()[1]))
    return own, ("127.0.0.1", int(store.get(f"port{1 - rank}")))


def in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def rank_that_waits(rank: int, world: int) -> dict[str, float]:
    """Milliseconds by way of waiting, at rank 0: the best median."""
    import torch
    import torch.distributed as dist

    init()
    small = torch.ones(16)
    own, there = echo(rank)

    def plain() -> None:
        _ = own.recv(16) if rank == 0 else own.sendto(b"x", there)

    def message() -> None:
        dist.recv(small, 1) if rank == 0 else dist.send(small, 1 - rank)

    def callback() -> None:
        called = threading.Event()
        dist.all_reduce(small, async_op=True).get_future().add_done_callback(lambda _: called.set())
        called.wait()

    ways: dict[str, Callable[[], object]] = {
        "socket": plain,
        "call": lambda: dist.all_reduce(small),
        "barrier": dist.barrier,
        "future": lambda: dist.all_reduce(small, async_op=True).get_future().wait(),
        "callback": callback,
        "message": message,
        "any sender": lambda: dist.recv(small) if rank == 0 else dist.send(small, 0),
        "thread": lambda: in_thread(lambda: dist.all_reduce(small)),
    }
    out: dict[str, float] = {}
    for name, way in [item for _ in range(ROUNDS) for item in ways.items()]:
        took = []
        for _ in range(TIMES):
            dist.barrier()
            if rank == 1:
                time.sleep(LATE)
            begin = time.monotonic()
            way()
            ends = torch.tensor([begin, time.monotonic()], dtype=torch.float64)
            both = [torch.empty_like(ends) for _ in range(world)]
            dist.all_gather(both, ends)
            took.append(float(both[0][1] - both[1][0]) * 1e3)
        out[name] = min(statistics.median(took), out.get(name, 1e9))
    dist.destroy_process_group()
    return out


def compute_until(when: float) -> None:
    while time.monotonic() < when:
        pass


def rank_that_computes(rank: int, world: int) -> dict[str, float]:
    """Milliseconds by call, of this rank: from when both have computed, the best lower quartile.
    Both need a core at the same moment, which a busy machine seldom has for them."""
    import torch
    import torch.distributed as dist

    init()
    small, large = torch.ones(16), torch.ones(1 << 14)
    own, there = echo(rank)
    when = torch.zeros(1, dtype=torch.float64)
    # A socket's thread, as the engine has one: on a busy machine either waits for a core as often.
    pool = ThreadPoolExecutor(1)

    def exchange() -> None:
        own.sendto(b"x", there)
        own.recv(16)

    ways: dict[str, Callable[[], object]] = {
        "socket": lambda: pool.submit(exchange).result(),
        "call": lambda: dist.all_reduce(small),
        "larger call": lambda: dist.all_reduce(large),
        "barrier": dist.barrier,
        "future": lambda: dist.all_reduce(small, async_op=True).get_future().wait(),
    }
    out: dict[str, float] = {}
    for name, way in [item for _ in range(ROUNDS) for item in ways.items()]:
        took = []
        for _ in range(TIMES):
            when.fill_(time.monotonic() + 2 * LATE)
            dist.broadcast(when, 0)
            compute_until(float(when))
            way()
            took.append((time.monotonic() - float(when)) * 1e3)
        out[name] = min(statistics.quantiles(took, n=4)[0], out.get(name, 1e9))
    pool.shutdown()
    dist.destroy_process_group()
    return out


def must_be_soon(found: dict[str, float]) -> None:
    late = {name: took / found["socket"] for name, took in found.items()}
    assert max(late.values()) < MOST, (late, found, os.getloadavg())


@pytest.mark.parametrize("link", ["shm", "udp"])
def test_calls_after_computing_take_as_long_as_a_socket_times_some(link: str) -> None:
    env = {"LOSSYCOLL_LINK": "udp"} if link == "udp" else {}
    for found in run_good(rank_that_computes, 2, env):
        assert len(found) == 5
        must_be_soon(found)


@pytest.mark.parametrize("link", ["shm", "udp"])
def test_who_waits_is_woken_as_by_a_socket(link: str) -> None:
    env = {"LOSSYCOLL_LINK": "udp"} if link == "udp" else {}
    found, _ = run_good(rank_that_waits, 2, env)
    assert len(found) == 8
    must_be_soon(found)
