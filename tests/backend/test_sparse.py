"""Sparse sums that are easily got wrong: complex numbers, and averages of integers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import lossycoll
from tests.support.harness import init, run_good


def rank_sparse(rank: int, world: int) -> None:
    init(timeout=30)
    for dtype in (torch.complex64, torch.complex128):
        value = torch.sparse_coo_tensor([[rank, 3]], [1 + 2j, rank + 1j], (5,), dtype=dtype)
        dist.all_reduce(value)
        want = torch.zeros(5, dtype=dtype)
        want[:world] += 1 + 2j
        want[3] += complex(sum(range(world)), world)
        torch.testing.assert_close(value.to_dense(), want, rtol=0, atol=0)
    with torch.inference_mode():
        value = torch.sparse_coo_tensor([[rank]], [1 + 2j], (5,))
        with pytest.raises(lossycoll.UnsupportedError, match=f"rank {rank}/{world}: all_reduce"):
            dist.all_reduce(value)

    value = torch.sparse_coo_tensor([[0, 1]], [-1 - rank, 7 + rank], (3,), dtype=torch.int64)
    dist.all_reduce(value, dist.ReduceOp.AVG)
    ranks = range(world)
    lost = -(sum(1 + r for r in ranks) // world)  # toward zero
    assert value.to_dense().tolist() == [lost, sum(7 + r for r in ranks) // world, 0]
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2])
def test_complex_sums_and_averages_of_integers(world: int) -> None:
    run_good(rank_sparse, world, {"LOSSYCOLL_LOG": "off"})
