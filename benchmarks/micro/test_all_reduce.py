"""All-reduce of lossy and gloo through pytest-benchmark: pytest benchmarks

Small on purpose; ``lossycoll bench`` interleaves the backends and is the one to quote.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

RANKS = 2
SIZES = {"64KiB": 1 << 16, "1MiB": 1 << 20, "25MiB": 25 << 20}


def serve(rank: int, port: int, orders: Connection) -> None:
    """A rank: does as many all-reduces as it is told to, and says how long they took."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo", rank=rank, world_size=RANKS)
    groups = {name: dist.new_group(backend=name) for name in ("lossy", "gloo")}
    while (order := orders.recv()) is not None:
        backend, size, count = order
        tensor = torch.zeros(size // 4)
        dist.barrier()
        started = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(tensor, group=groups[backend])
        orders.send((time.perf_counter() - started) / count)
    dist.destroy_process_group()


class Ranks:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._orders = []
        self._processes = []
        for rank in range(RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, port, theirs), daemon=True)
            process.start()
            theirs.close()  # so that a rank's death is an EOFError here and not a hang
            self._orders.append(mine)
            self._processes.append(process)

    def all_reduce(self, backend: str, size: int, count: int = 1) -> float:
        for orders in self._orders:
            orders.send((backend, size, count))
        taken: list[float] = [orders.recv() for orders in self._orders]
        return max(taken)

    def close(self) -> None:
        for orders in self._orders:
            orders.send(None)
        for process in self._processes:
            process.join(20)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()


@pytest.mark.parametrize("backend", ["lossy", "gloo"])
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce(benchmark: Any, ranks: Ranks, size: str, backend: str) -> None:
    benchmark.group = size
    ranks.all_reduce(backend, SIZES[size], count=2)  # warm up
    benchmark.pedantic(ranks.all_reduce, args=(backend, SIZES[size]), rounds=20)
