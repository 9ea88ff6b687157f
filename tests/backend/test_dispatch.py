"""Which way a call takes: every row of the table in docs/backend.md, without a group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lossycoll.backend import collectives as table
from lossycoll.backend.block_collectives import ALL_GATHER_BLOCKS
from lossycoll.backend.description import CollectiveKind, Description
from lossycoll.backend.dispatch import Way, choose, reliable_version
from lossycoll.backend.reduction import resolve
from lossycoll.options.fields import Options
from lossycoll.runtime.engine.failures import Where

Op = dist.ReduceOp
LOSSY = Options(lossy_min_bytes=4096)
RELIABLE = Options(lossy_min_bytes=4096, delivery="reliable")
BULK = Options(lossy_min_bytes=4096, bulk_min_bytes=1024)
LARGE, SMALL = 8192, 512


def way(
    kind: CollectiveKind,
    *,
    nbytes: int = LARGE,
    dtype: torch.dtype = torch.float32,
    op: Any = None,
    options: Options = LOSSY,
    scope: bool = False,
    world: int = 3,
    sizes: tuple[int, ...] | None = None,
) -> Way:
    tensor = torch.zeros(1, dtype=dtype)
    reduction = None if op is None else resolve(Where(0, world), kind.name, dtype, op)
    call = Description(kind, [tensor], [tensor], nbytes, tensor, op=op, sizes=sizes)
    choice = choose(call, reduction, options, scope, world)
    assert choice.options == (options if choice.way is Way.LOSSY else reliable_version(options))
    return choice.way


REDUCTIONS = [table.ALL_REDUCE, table.REDUCE_SCATTER]
COPIES = [table.BROADCAST, table.ALL_GATHER]
EXACT = [table.GATHER, table.SCATTER, table.ALL_TO_ALL, table.BARRIER]


@pytest.mark.parametrize("kind", REDUCTIONS, ids=lambda kind: kind.name)
def test_large_sums_of_floats_may_lose_packets(kind: CollectiveKind) -> None:
    for op in (Op(Op.SUM), Op(Op.AVG)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
            assert way(kind, op=op, dtype=dtype) is Way.LOSSY
            assert way(kind, op=op, dtype=dtype, nbytes=SMALL) is Way.RELIABLE
            assert way(kind, op=op, dtype=dtype, options=RELIABLE) is Way.RELIABLE


@pytest.mark.parametrize("kind", REDUCTIONS, ids=lambda kind: kind.name)
def test_what_the_engine_cannot_add_is_gathered(kind: CollectiveKind) -> None:
    assert way(kind, op=Op(Op.MAX)) is Way.GATHERED
    assert way(kind, op=Op(Op.AVG), dtype=torch.int64) is Way.GATHERED
    assert way(kind, op=Op(Op.SUM), dtype=torch.bool, options=BULK, nbytes=SMALL) is Way.GATHERED


def test_reduce_is_always_gathered_at_its_root() -> None:
    assert way(table.REDUCE, op=Op(Op.SUM)) is Way.GATHERED
    assert way(table.REDUCE, op=Op(Op.SUM), scope=True) is Way.GATHERED


@pytest.mark.parametrize("kind", COPIES, ids=lambda kind: kind.name)
def test_copies_lose_packets_only_in_a_lossy_scope(kind: CollectiveKind) -> None:
    assert way(kind) is Way.RELIABLE
    assert way(kind, scope=True) is Way.LOSSY
    assert way(kind, scope=True, dtype=torch.complex64) is Way.LOSSY
    assert way(kind, scope=True, dtype=torch.int64) is Way.RELIABLE
    assert way(kind, scope=True, nbytes=SMALL) is Way.RELIABLE


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_what_has_no_use_for_loss_is_reliable_everywhere(kind: CollectiveKind) -> None:
    assert way(kind) is Way.RELIABLE
    assert way(kind, scope=True) is Way.RELIABLE


def test_blocks_follow_the_delivery_in_any_size() -> None:
    assert way(ALL_GATHER_BLOCKS, nbytes=SMALL, dtype=torch.uint8) is Way.LOSSY
    assert way(ALL_GATHER_BLOCKS, options=RELIABLE) is Way.RELIABLE


def test_gloo_gets_small_exact_calls_that_it_can_do_and_only_if_it_may() -> None:
    small = {"nbytes": SMALL, "options": BULK}
    for kind in (table.BROADCAST, table.ALL_GATHER, table.GATHER, table.SCATTER):
        assert way(kind, **small) is Way.GLOO
        assert way(kind, **small, dtype=torch.bool) is Way.RELIABLE
        assert way(kind, **small, world=1) is Way.RELIABLE
        assert way(kind, nbytes=SMALL) is Way.RELIABLE
        assert way(kind, options=BULK) is Way.RELIABLE
    assert way(table.ALL_GATHER, **small, sizes=(1, 2, 3)) is Way.RELIABLE
    assert way(table.ALL_TO_ALL, **small) is Way.RELIABLE
    assert way(table.ALL_REDUCE, **small, op=Op(Op.SUM)) is Way.GLOO
    assert way(table.ALL_REDUCE, **small, op=Op(Op.MAX)) is Way.GATHERED
    assert way(table.REDUCE_SCATTER, **small, op=Op(Op.SUM)) is Way.RELIABLE


def test_the_signature_of_block_collectives_holds_no_class_name() -> None:
    from lossycoll.runtime.engine.packet_masks import Blocks, Contributions

    # They are on the wire: ranks of other versions compare them.
    assert (Blocks.meaning, Contributions.meaning) == ("Blocks", "Contributions")
    renamed = type("Renamed", (Blocks,), {})
    assert renamed.meaning == "Blocks"
