"""Tensors as buffers of the engine, and back."""

from __future__ import annotations

import torch

from lossycoll.backend import collectives as table
from lossycoll.backend.description import Description
from lossycoll.backend.reduction import resolve
from lossycoll.backend.staging import gathered, one_buffer, two_buffers
from lossycoll.backend.tensors import apart, as_real, contiguous, overlaps_itself, room
from lossycoll.runtime.engine.failures import Where

SUM = torch.distributed.ReduceOp(torch.distributed.ReduceOp.SUM)


def test_dense_tensors_are_their_own_buffers() -> None:
    source, target = torch.arange(4.0), torch.zeros(8)
    call = Description(table.ALL_GATHER, [source], [target])
    staged = two_buffers(call, None, False)
    assert staged.source is source
    assert staged.target is target
    assert staged.epilogue is None


def test_strided_tensors_are_copied_there_and_back() -> None:
    whole = torch.zeros(4, 6)
    call = Description(table.BROADCAST, [whole[:, ::2]], [whole[:, ::2]])
    staged = one_buffer(call, None, False)
    assert staged.target.is_contiguous()
    staged.target.fill_(3.0)
    assert whole.sum() == 0
    assert staged.epilogue is not None
    staged.epilogue()
    assert whole[:, ::2].eq(3).all()
    assert whole[:, 1::2].eq(0).all()


def test_complex_sums_are_pairs_of_floats_in_the_same_memory() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    reduction = resolve(Where(0, 2), "all_reduce", tensor.dtype, SUM)
    staged = one_buffer(Description(table.ALL_REDUCE, [tensor], [tensor]), reduction, False)
    assert staged.target.tolist() == [1, 2, 3, -4]
    assert staged.target.data_ptr() == tensor.data_ptr()
    conjugated = tensor.conj()
    staged = one_buffer(Description(table.ALL_REDUCE, [conjugated], [conjugated]), reduction, False)
    assert staged.target.tolist() == [1, -2, 3, 4]
    staged.target[0] = 9
    assert staged.epilogue is not None
    staged.epilogue()
    assert conjugated.tolist() == [9 - 2j, 3 + 4j]


def test_a_list_in_one_memory_is_filled_there_and_any_other_keeps_what_is_lost() -> None:
    rows = torch.zeros(2, 3)
    staged = two_buffers(Description(table.ALL_GATHER, [torch.ones(3)], list(rows)), None, False)
    assert staged.target.data_ptr() == rows.data_ptr()
    assert staged.epilogue is None
    parts = [torch.full((3,), 5.0), torch.full((3,), 6.0)]
    staged = two_buffers(Description(table.ALL_GATHER, [torch.ones(3)], parts), None, True)
    assert staged.target.tolist() == [5, 5, 5, 6, 6, 6]


def test_who_only_reads_or_only_writes_has_one_buffer() -> None:
    tensor = torch.ones(3)
    for call in (
        Description(table.GATHER, [tensor], []),
        Description(table.SCATTER, [], [tensor]),
    ):
        staged = two_buffers(call, None, False)
        assert staged.source is staged.target is tensor


def test_only_the_root_reduces_what_is_gathered() -> None:
    tensor = torch.tensor([1.0, 2.0])
    reduction = resolve(Where(0, 3), "reduce", tensor.dtype, SUM)
    call = Description(table.REDUCE, [tensor], [tensor], root=1)
    other = gathered(call, reduction, 0, 3)
    assert other.source is other.target is tensor
    assert other.among is not None
    other.among((0, 1, 2))
    assert tensor.tolist() == [1, 2]
    root = gathered(call, reduction, 1, 3)
    root.target.copy_(torch.tensor([[1.0, 1], [2, 2], [4, 4]]))
    assert root.among is not None
    root.among((0, 1, 2))
    assert tensor.tolist() == [7, 7]


def test_overlaps() -> None:
    memory = torch.arange(8.0)
    assert apart(memory[:4], memory[4:]).data_ptr() == memory.data_ptr()
    assert apart(memory[:4], memory[2:6]).data_ptr() != memory.data_ptr()
    assert apart(memory[:4], memory, own=0).data_ptr() == memory.data_ptr()
    assert overlaps_itself(torch.zeros(1).expand(3))
    assert not overlaps_itself(torch.zeros(2, 3).t())
    assert not overlaps_itself(torch.zeros(1, 3).expand(1, 3))


def test_room_and_contiguous() -> None:
    parts = [torch.zeros(2), torch.zeros(0), torch.zeros(3)]
    buffer, finish = room(parts, kept=False)
    buffer.copy_(torch.arange(5.0))
    assert finish is not None
    finish()
    assert [part.tolist() for part in parts] == [[0, 1], [], [2, 3, 4]]
    tensor = torch.arange(6.0).view(2, 3)
    assert contiguous(tensor) is tensor
    assert contiguous(tensor.t()).tolist() == tensor.t().tolist()
    assert as_real(tensor) is tensor
