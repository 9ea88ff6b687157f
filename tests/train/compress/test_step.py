"""A step's gradients and their spans of a vector, as data."""

from __future__ import annotations

import torch

from lossycoll.train.compress.error_memory import memory_of
from lossycoll.train.compress.selection import MatrixShape
from lossycoll.train.compress.step import BucketGradient, end_of, spans_of


def gradient(key: str, *shape: int, dtype: torch.dtype = torch.float32) -> BucketGradient:
    tensor = torch.arange(float(torch.Size(shape).numel()), dtype=dtype).view(shape)
    matrix = MatrixShape(shape[0], tensor.numel() // shape[0])
    return BucketGradient(key, repr(key), tensor, matrix, memory_of("none"))


def test_pieces_lie_one_behind_another() -> None:
    a, b = gradient("a", 2, 3), gradient("b", 4, 1)
    rows = spans_of((g, g.matrix.numel()) for g in (a, b))
    more = spans_of([(a, 1)], end_of(rows))
    assert [(p.begin, p.end) for p in (*rows, *more)] == [(0, 6), (6, 10), (10, 11)]
    assert (end_of([]), end_of(more)) == (0, 11)
    flat = torch.arange(22.0).view(2, 11)
    assert rows[1].of(flat[0]).tolist() == [6, 7, 8, 9]
    assert more[0].of(flat).tolist() == [[10], [21]]  # of all ranks' vectors


def test_selected_rows_are_those_of_the_gradient() -> None:
    one = gradient("a", 4, 2, 2)
    one.index = torch.tensor([1, 3])
    assert one.selected == 8
    out = torch.empty(8)
    one.select(out)
    assert out.tolist() == [4, 5, 6, 7, 12, 13, 14, 15]


def test_a_narrow_gradient_is_worked_on_in_32_bits_and_written_back() -> None:
    narrow, wide = gradient("a", 2, 3, dtype=torch.bfloat16), gradient("b", 2, 3)
    assert narrow.matrix.dtype == torch.float32
    assert wide.matrix.data_ptr() == wide.tensor.data_ptr()
    for each in (narrow, wide):
        each.matrix.mul_(2)
        each.write_back()
        assert each.tensor.flatten().tolist() == [0, 2, 4, 6, 8, 10]
        assert not each.nonfinite
