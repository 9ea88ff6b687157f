"""Slices: every element is in one, and each rank owns each chunk in turn."""

from __future__ import annotations

import pytest

from lossycoll.train.drift.slices import ALIGN, slice_owner, slice_up


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("period", [1, 4, 7, 1000])
def test_slices_hold_every_element_once(period: int, world: int) -> None:
    sizes = [(1000, 4), (7, 2), (0, 4), (1, 16), (333, 8), (1, 2)]
    slices = slice_up(sizes, period, world)
    assert len(slices.chunks) == period * world
    seen: dict[int, list[int]] = {tensor: [] for tensor in range(len(sizes))}
    for pieces in slices.chunks:
        end = 0
        for piece in pieces:
            itemsize = sizes[piece.tensor][1]
            assert piece.at >= end
            assert piece.at % itemsize == 0
            end = piece.at + (piece.end - piece.begin) * itemsize
            seen[piece.tensor] += range(piece.begin, piece.end)
        assert end <= slices.chunk_bytes
    assert seen == {tensor: list(range(n)) for tensor, (n, _) in enumerate(sizes)}
    total = sum(n * itemsize for n, itemsize in sizes)
    padded = total + ALIGN * len(sizes)
    assert slices.chunk_bytes * world <= padded / period + ALIGN * world


def test_each_rank_owns_each_chunk_in_turn_and_one_of_each_slice() -> None:
    for world in (1, 2, 3, 5):
        for number in range(7):
            for sweep in range(4):
                owners = {slice_owner(number, chunk, sweep, world) for chunk in range(world)}
                assert owners == set(range(world))
            for chunk in range(world):
                owners = {slice_owner(number, chunk, sweep, world) for sweep in range(world)}
                assert owners == set(range(world))
