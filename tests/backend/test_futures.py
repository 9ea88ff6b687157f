"""Futures whose callbacks issue collectives, as PowerSGD's hook does."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import init, run_good

SIZES = (3000, 5000, 7000)


def chained(rank: int, size: int, threads: list[int]) -> Any:
    """A future: the sum of ``rank + 1``, plus that of ``size`` ones, formed in a callback."""

    def more(first: Any) -> torch.Tensor:
        threads.append(threading.get_ident())
        ones = torch.ones(size)
        work = dist.all_reduce(ones, async_op=True)
        return first.value()[0] + work.get_future().wait()[0]

    tensor = torch.full((size,), float(rank + 1))
    return dist.all_reduce(tensor, async_op=True).get_future().then(more)


def waits_in_a_callback(rank: int, world: int) -> list[float]:
    """The callback runs in the thread that completes futures, and waits for another one there."""
    init()
    values = []
    threads: list[int] = []
    for late in range(world):
        dist.barrier()
        if rank == late:
            time.sleep(0.3)  # so that on the others it is not done when ``then`` is called
        values.append(float(chained(rank, 1000, threads).wait().mean()))
    assert set(threads) != {threading.get_ident()}, "nothing was completed by another thread"
    dist.destroy_process_group()
    return values


def several_in_order(rank: int, world: int) -> list[float]:
    """Several chains at once, of different sizes: in any other order than this they don't match."""
    init(pg_options={"futures": "in_order"})
    threads: list[int] = []
    futures = []
    for size in SIZES:
        time.sleep(0.05 * rank)
        futures.append(chained(rank, size, threads))
    assert set(threads) == {threading.get_ident()}
    values = [float(future.wait().mean()) for future in futures]
    dist.destroy_process_group()
    return values


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("function", [waits_in_a_callback, several_in_order])
def test_callbacks_may_issue_collectives(function: Any, world: int) -> None:
    expected = float(sum(range(1, world + 1)) + world)
    for values in run_good(function, world):
        assert values == [expected] * len(values)
        assert values
