"""Which route a call takes: every row of the table in docs/backend.md, without a group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lossycoll.backend import collectives as table
from lossycoll.backend.collectives import ALL_GATHER_BLOCKS, REDUCE_SCATTER_BLOCKS
from lossycoll.backend.description import CollectiveKind, Description, Splits
from lossycoll.backend.dispatch import choose, determined, is_gathered, reliable_version
from lossycoll.backend.reduction import resolve
from lossycoll.options.fields import Options
from lossycoll.options.scopes import Scope, within
from lossycoll.runtime.engine.failures import Where

Op = dist.ReduceOp
LOSSY = Options(lossy_min_bytes=4096)
RELIABLE = Options(lossy_min_bytes=4096, delivery="reliable")
ENCODED = Options(lossy_min_bytes=4096, wire="bf16")
LARGE, SMALL = 8192, 512


def route(
    kind: CollectiveKind,
    *,
    nbytes: int = LARGE,
    dtype: torch.dtype = torch.float32,
    op: Any = None,
    options: Options = LOSSY,
    scope: bool = False,
) -> str:
    tensor = torch.zeros(1, dtype=dtype)
    reduction = None if op is None else resolve(Where(0, 3), kind.name, dtype, op)
    call = Description(kind, [tensor], [tensor], nbytes, tensor, op=op)
    around = Scope((), lossy_copies=True) if scope else None
    choice = choose(call, reduction, options, around)
    assert choice.options == (options if choice.lossy else reliable_version(options))
    if is_gathered(kind, reduction):
        assert not choice.lossy
        return "gathered"
    return choice.options.delivery


REDUCTIONS = [table.ALL_REDUCE, table.REDUCE_SCATTER]
COPIES = [table.BROADCAST, table.ALL_GATHER]
EXACT = [table.GATHER, table.SCATTER, table.ALL_TO_ALL, table.BARRIER]


@pytest.mark.parametrize("kind", REDUCTIONS, ids=lambda kind: kind.name)
def test_large_sums_of_floats_may_lose_packets(kind: CollectiveKind) -> None:
    for op in (Op(Op.SUM), Op(Op.AVG)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
            assert route(kind, op=op, dtype=dtype) == "lossy"
            assert route(kind, op=op, dtype=dtype, nbytes=SMALL) == "reliable"
            assert route(kind, op=op, dtype=dtype, options=RELIABLE) == "reliable"


@pytest.mark.parametrize("kind", REDUCTIONS, ids=lambda kind: kind.name)
def test_what_the_engine_cannot_add_is_gathered(kind: CollectiveKind) -> None:
    assert route(kind, op=Op(Op.MAX)) == "gathered"
    assert route(kind, op=Op(Op.AVG), dtype=torch.int64) == "gathered"
    assert route(kind, op=Op(Op.SUM), dtype=torch.bool, nbytes=SMALL) == "gathered"


def test_reduce_is_always_gathered_at_its_root() -> None:
    assert route(table.REDUCE, op=Op(Op.SUM)) == "gathered"
    assert route(table.REDUCE, op=Op(Op.SUM), scope=True) == "gathered"


@pytest.mark.parametrize("kind", COPIES, ids=lambda kind: kind.name)
def test_copies_lose_packets_only_in_a_lossy_scope(kind: CollectiveKind) -> None:
    assert route(kind) == "reliable"
    assert route(kind, scope=True) == "lossy"
    assert route(kind, scope=True, dtype=torch.complex64) == "lossy"
    assert route(kind, scope=True, dtype=torch.int64) == "reliable"
    assert route(kind, scope=True, nbytes=SMALL) == "reliable"


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_what_has_no_use_for_loss_is_reliable_everywhere(kind: CollectiveKind) -> None:
    assert route(kind) == "reliable"
    assert route(kind, scope=True) == "reliable"


def test_blocks_follow_the_delivery_in_any_size() -> None:
    assert route(ALL_GATHER_BLOCKS, nbytes=SMALL, dtype=torch.uint8) == "lossy"
    assert route(ALL_GATHER_BLOCKS, options=RELIABLE) == "reliable"


def encoding(
    kind: CollectiveKind,
    *,
    nbytes: int = LARGE,
    dtype: torch.dtype = torch.float32,
    block: tuple[tuple[str, Any], ...] | None = None,
    options: Options = ENCODED,
) -> str:
    """How float32 travels, in a block that sets the options ``block``."""
    around = None if block is None else Scope(block, lossy_copies=True)
    op = Op(Op.SUM) if kind in (*REDUCTIONS, table.REDUCE) else None
    reduction = None if op is None else resolve(Where(0, 3), kind.name, dtype, op)
    splits = Splits([0], [0]) if kind is table.ALL_TO_ALL else None
    tensor = torch.zeros(1, dtype=dtype)
    nbytes = 0 if splits else nbytes
    call = Description(kind, [tensor], [tensor], nbytes, tensor, op=op, splits=splits)
    options = options if around is None else within(options, around)
    return choose(call, reduction, options, around).encoding


WIRE = (("wire", "fp16"),)
GATHERS = [table.ALL_GATHER, table.GATHER, table.REDUCE]
HANDED_OUT = [table.BROADCAST, table.SCATTER, table.ALL_TO_ALL]


@pytest.mark.parametrize("kind", [*REDUCTIONS, *GATHERS], ids=lambda kind: kind.name)
def test_large_float32_is_encoded_as_the_group_or_the_block_asks(kind: CollectiveKind) -> None:
    assert encoding(kind) == "bf16"
    assert encoding(kind, options=replace(ENCODED, delivery="reliable")) == "bf16"
    assert encoding(kind, dtype=torch.complex64) == "bf16"
    assert encoding(kind, block=()) == "bf16"
    assert encoding(kind, block=WIRE) == "fp16"
    assert encoding(kind, block=WIRE, options=LOSSY) == "fp16"
    assert encoding(kind, block=(("wire", "same"),)) == "same"
    assert encoding(kind, nbytes=SMALL) == encoding(kind, nbytes=SMALL, block=WIRE) == "same"
    assert encoding(kind, options=LOSSY) == "same"
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.complex128):
        assert encoding(kind, dtype=dtype) == "same"


@pytest.mark.parametrize("kind", HANDED_OUT, ids=lambda kind: kind.name)
def test_what_is_handed_out_is_encoded_only_where_a_block_says_so(kind: CollectiveKind) -> None:
    assert encoding(kind) == "same"
    assert encoding(kind, block=(("repair", 1),)) == "same"
    assert encoding(kind, block=WIRE) == "fp16"
    assert encoding(kind, block=WIRE, dtype=torch.int64) == "same"


def test_what_counts_or_maps_to_blocks_is_never_encoded() -> None:
    for kind in (table.BARRIER, ALL_GATHER_BLOCKS, REDUCE_SCATTER_BLOCKS):
        assert encoding(kind, block=WIRE) == "same"


def test_the_signature_of_block_collectives_holds_no_class_name() -> None:
    from lossycoll.runtime.engine.packet_masks import Blocks, Contributions

    # They are on the wire: ranks of other versions compare them.
    assert (Blocks.meaning, Contributions.meaning) == ("Blocks", "Contributions")
    renamed = type("Renamed", (Blocks,), {})
    assert renamed.meaning == "Blocks"


@pytest.mark.parametrize("change", [determined, reliable_version])
def test_changed_options_keep_what_was_set_for_their_own_group(change: Any) -> None:
    """Groups may have equal values of which others are set."""
    change.cache_clear()
    for options in (LOSSY, replace(LOSSY, repair=0), replace(LOSSY, fec=0), LOSSY):
        assert change(options).given - {"deterministic", "delivery"} == options.given
