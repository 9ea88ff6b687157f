"""A step's gradients as data."""

from __future__ import annotations

import torch

from lossycoll.train.compress.error_memory import memory_of
from lossycoll.train.compress.selection import MatrixShape
from lossycoll.train.compress.step import BucketGradient


def gradient(key: str, *shape: int, dtype: torch.dtype = torch.float32) -> BucketGradient:
    tensor = torch.arange(float(torch.Size(shape).numel()), dtype=dtype).view(shape)
    matrix = MatrixShape(shape[0], tensor.numel() // shape[0])
    return BucketGradient(key, repr(key), tensor, matrix, memory_of("none"))


def test_a_narrow_gradient_is_worked_on_in_32_bits_and_written_back() -> None:
    narrow, wide = gradient("a", 2, 3, dtype=torch.bfloat16), gradient("b", 2, 3)
    assert narrow.matrix.dtype == torch.float32
    assert wide.matrix.data_ptr() == wide.tensor.data_ptr()
    for each in (narrow, wide):
        each.matrix.mul_(2)
        each.write_back()
        assert each.tensor.flatten().tolist() == [0, 2, 4, 6, 8, 10]
        assert not each.nonfinite
