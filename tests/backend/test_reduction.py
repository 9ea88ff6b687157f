"""Reductions that ranks form themselves, against numpy."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.backend.reduction import INTEGERS, local_reduction, over_ranks, resolve
from lossycoll.runtime.engine.failures import Where

Op = dist.ReduceOp
WHERE = Where(0, 3)


def rows_of(dtype: torch.dtype, ranks: int, shape: tuple[int, ...] = (4, 251)) -> torch.Tensor:
    """All bits at random, so that sums wrap."""
    bits = torch.randint(
        0, 256, (ranks, *shape, dtype.itemsize), generator=torch.Generator().manual_seed(ranks)
    )
    return bits.to(torch.uint8).view(dtype).reshape(ranks, *shape)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_average_of_integers_is_nccls(dtype: torch.dtype, ranks: int) -> None:
    rows = rows_of(dtype, ranks)
    total = reduce(np.add, list(rows.numpy()))  # wraps, as SUM does
    # Python's integers: divided exactly, truncated toward zero.
    want = [abs(v) // ranks * (-1 if v < 0 else 1) for v in total.flatten().tolist()]
    got = resolve(WHERE, "all_reduce", dtype, Op(Op.AVG)).local(rows)
    assert got.dtype == dtype
    assert got.shape == rows.shape[1:]
    assert got.flatten().tolist() == want
    if dtype.is_signed and ranks > 1:
        exact = total.flatten().tolist()
        assert any(v < 0 and v % ranks for v in exact), "no case in which rounding matters"


@pytest.mark.parametrize("ranks", [200, 256, 257])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_average_over_more_ranks_than_the_dtype_counts(dtype: torch.dtype, ranks: int) -> None:
    totals = torch.tensor([torch.iinfo(dtype).min, 0, 100, torch.iinfo(dtype).max], dtype=dtype)
    got = over_ranks(totals, ranks)
    assert got.dtype == dtype
    assert got.tolist() == [int(total / ranks) for total in totals.tolist()]
    rows = torch.zeros((ranks, 2), dtype=dtype)
    rows[:100] = 1
    rows[:, 1] = 1
    local = local_reduction(Op.AVG, dtype)
    assert local is not None
    wrapped = int(torch.tensor(ranks).to(dtype))
    assert local(rows).tolist() == [0, int(wrapped / ranks)]


def test_average_of_one_integer_per_rank() -> None:
    for dtype in (torch.int64, torch.uint64):
        local = local_reduction(Op.AVG, dtype)
        assert local is not None
        mean = local(torch.tensor([1, 2, 5], dtype=dtype))
        assert mean.shape == ()
        assert int(mean) == 2


def test_average_of_negative_integers_goes_toward_zero() -> None:
    local = local_reduction(Op.AVG, torch.int32)
    assert local is not None
    assert local(torch.tensor([[-3, 3, -1], [-4, 4, 0]], dtype=torch.int32)).tolist() == [-3, 3, 0]


def test_average_of_survivors_counts_only_them() -> None:
    rows = torch.tensor([[9], [1000], [-4]])
    average = resolve(WHERE, "all_reduce", torch.int64, Op(Op.AVG))
    assert average.over(rows, (0, 2)).tolist() == [2]
    summed = resolve(WHERE, "all_reduce", torch.int64, Op(Op.SUM))
    assert summed.over(rows, (0, 2)).tolist() == [5]
    # A sum of floats stands for all ranks: the mean of those that are left, times the world.
    floats = resolve(WHERE, "all_reduce", torch.float32, Op(Op.SUM))
    assert floats.over(rows.float(), (0, 2)).tolist() == [7.5]
    pairs = resolve(WHERE, "reduce", torch.complex64, Op(Op.SUM))
    assert pairs.over(rows.to(torch.complex64), (0, 2)).tolist() == [7.5]


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.bool, Op.AVG),
        (torch.float32, Op.BAND),
        (torch.complex64, Op.MAX),
        (torch.float8_e5m2, Op.AVG),
        (torch.float8_e5m2, Op.SUM),
    ],
)
def test_what_has_no_meaning_is_refused(dtype: torch.dtype, op: object) -> None:
    with pytest.raises(lossycoll.UnsupportedError, match=r"rank 0/3: reduce can't form the"):
        resolve(WHERE, "reduce", dtype, Op(op))


def test_unsigned_order_and_sums() -> None:
    rows = torch.tensor([[1, 2**16 - 1], [3, 2]], dtype=torch.uint16)
    for op, want in ((Op.MAX, [3, 65535]), (Op.MIN, [1, 2]), (Op.SUM, [4, 1])):
        local = local_reduction(op, torch.uint16)
        assert local is not None
        assert local(rows).tolist() == want
