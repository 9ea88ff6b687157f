"""Checks of every ending, by which test_runner.py sees what the runner makes of them."""

from __future__ import annotations

import os
import threading

import pytest
import torch.distributed as dist

from tests.gpu.checks import Rank, Table

TABLE = Table()


@TABLE.check()
def passes(rank: Rank) -> None:
    t = rank.full(10, 1)
    dist.all_reduce(t)
    assert (t == rank.world).all()


@TABLE.check()
def fails_on_the_last_rank(rank: Rank) -> None:
    """The first one waits for it in a collective, which must end."""
    assert rank.rank != rank.world - 1, "the last rank only"
    dist.all_reduce(rank.full(10, 1))


@TABLE.check()
def skips(rank: Rank) -> None:
    del rank
    pytest.skip("known inside")


@TABLE.check(limit=1)
def hangs_on_the_first_rank(rank: Rank) -> None:
    if rank.rank == 0:
        threading.Event().wait()


@TABLE.check()
def ends_its_process(rank: Rank) -> None:
    if rank.rank == 1:
        os._exit(3)
    dist.all_reduce(rank.full(10, 1))


@TABLE.check()
def passes_at_the_end(rank: Rank) -> None:
    passes(rank)


@TABLE.check(cuda=True)
def is_of_cuda(rank: Rank) -> None:
    raise AssertionError(f"{rank.device} isn't CUDA")
