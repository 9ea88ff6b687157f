"""The pool of host memory."""

from __future__ import annotations

import torch
from torch import Tensor

from lossycoll.devices.layer import LEAST, HostMemory, size_of


def made(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_a_piece_is_used_again() -> None:
    pool = HostMemory(made)
    piece = pool.take(5000)
    assert piece.numel() >= 5000
    other = pool.take(5000)
    assert other.data_ptr() != piece.data_ptr()
    pool.give_back(piece)
    assert pool.take(4500).data_ptr() == piece.data_ptr()
    assert pool.pieces == 2


def test_calls_that_come_again_take_nothing_new() -> None:
    pool = HostMemory(made)
    for _ in range(20):
        pieces = [pool.take(nbytes) for nbytes in (64, 4096, 25 << 20, 0)]
        for piece in pieces:
            pool.give_back(piece)
    assert pool.pieces == 4


def test_sizes_waste_a_third_at_most() -> None:
    for nbytes in (0, 1, LEAST, LEAST + 1, 6144, 6145, 10**6, 3 << 20, (3 << 20) + 1, 10**9):
        size = size_of(nbytes)
        assert size >= nbytes
        assert size_of(size) == size
        assert nbytes <= LEAST or size <= 1.5 * nbytes
