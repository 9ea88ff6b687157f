"""Tensors as matrices."""

from __future__ import annotations

import pytest
import torch

from lossycoll.train.compress.selection import (
    MatrixShape,
    as_matrix,
    by_first_dimension,
    kept_rows,
    pays,
)


def test_matrix_forms() -> None:
    assert by_first_dimension((64, 16, 3, 3)) == MatrixShape(64, 144)
    assert by_first_dimension((1000, 32)) == MatrixShape(1000, 32)
    assert [kept_rows(m, 0.1) for m in (1, 10, 30, 31)] == [1, 1, 3, 4]
    assert pays(MatrixShape(1024, 1024), 0.2, 4)
    assert not pays(MatrixShape(1024, 4), 0.2, 4)  # a sketch as wide as the matrix
    assert not pays(MatrixShape(10, 1000), 1.0, 4)
    weight = torch.randn(6, 4, 3, 3)
    assert torch.equal(as_matrix(weight, MatrixShape(6, 36)), weight.view(6, 36))
    last = weight.contiguous(memory_format=torch.channels_last)
    assert torch.equal(
        as_matrix(last, MatrixShape(6, 36)), weight.permute(0, 2, 3, 1).reshape(6, 36)
    )
    with pytest.raises(ValueError, match="gaps"):
        as_matrix(torch.zeros(6, 8)[:, :4], MatrixShape(6, 4))
