"""Plans as tables: they fit each other, cover what they should, and encode as C reads them."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import permutations
from math import sqrt
from pathlib import Path

import pytest
from cffi import FFI
from hypothesis import given, settings
from hypothesis import strategies as st

from lossycoll.plan import (
    Combine,
    Edge,
    Finish,
    Missing,
    Own,
    Slot,
    Target,
    choose_algorithm,
    copies,
    data_movement,
    draw_order,
    encode,
    hierarchical,
    reduce_scatter,
    ring,
    segments,
)
from lossycoll.plan.model import MOST_SLOTS
from tests.support import plan_checks
from tests.support.plan_cases import CASES, ELEMENTS_PER_PACKET, Case, counts

HEADERS = [
    Path(__file__).resolve().parents[2] / "native" / f"lossycoll_{part}.h"
    for part in ("types", "plan")
]


@pytest.mark.parametrize("check", plan_checks.PLAN_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_plans_of_every_algorithm(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def test_a_ring_of_one_has_nothing_to_do() -> None:
    assert not choose_algorithm("all_reduce", "ring", 4).serves(1)
    for count in counts(1):
        plan = ring.all_reduce(1, 0, count, ELEMENTS_PER_PACKET)
        assert (plan.slots, plan.in_elements, plan.scratch_elements) == ((), count, 0)


def spreads(case: Case) -> bool:
    """Whether every rank has something for every other one at once."""
    rooted = case.algorithm.collective in ("gather", "scatter")
    if rooted or (case.tiers and case.algorithm.relays):
        return False
    return case.algorithm.direct or case.algorithm.name == "transpose"


@pytest.mark.parametrize("case", [c for c in CASES if spreads(c)], ids=lambda case: case.name)
def test_ranks_begin_with_different_peers(case: Case) -> None:
    for plan in case.plans(8, 30 * 8, ELEMENTS_PER_PACKET):
        first = [slot for slot in plan.slots if slot.own]
        away = [(edge.peer - plan.rank) % 8 for slot in first for edge in slot.dests]
        if plan.collective == "all_reduce":
            # Contributions are sent out first, means once they are formed.
            assert away == [1, 2, 3, 4, 5, 6, 7] * 2
        elif "uneven" in case.name:
            assert away == sorted(away)
        else:
            assert away == [1, 2, 3, 4, 5, 6, 7]


def test_signature_differs_when_anything_differs() -> None:
    swapped = (1, 0, 2, 3)
    plans = [
        hierarchical.all_reduce(4, 0, 100, 7),
        hierarchical.all_reduce(5, 0, 100, 7),
        hierarchical.all_reduce(4, 0, 101, 7),
        hierarchical.all_reduce(4, 0, 100, 8),
        hierarchical.all_reduce(4, 0, 100, 7, order=swapped),
        hierarchical.all_reduce(4, 0, 100, 7, missing=Missing.KEEP),
        ring.all_reduce(4, 0, 100, 7),
        ring.all_reduce(5, 0, 100, 7),
        ring.all_reduce(4, 0, 101, 7),
        ring.all_reduce(4, 0, 100, 8),
        ring.all_reduce(4, 0, 100, 7, order=swapped),
        ring.all_reduce(4, 0, 100, 7, missing=Missing.KEEP),
        reduce_scatter.reduce_scatter(4, 0, 25, 7),
        reduce_scatter.reduce_scatter(4, 0, 26, 7),
        reduce_scatter.reduce_scatter(4, 0, 25, 8),
        reduce_scatter.reduce_scatter(4, 0, (24, 26, 25, 25), 7),
        copies.all_gather(4, 0, 25, 7),
        copies.all_gather(4, 0, 26, 7),
        copies.all_gather(4, 0, (24, 26, 25, 25), 7),
        data_movement.all_to_all(4, 0, 25, 7),
        data_movement.all_to_all(4, 0, 26, 7),
        data_movement.all_to_all_uneven(4, 0, (25,) * 4, (25,) * 4, 7),
        data_movement.gather(4, 0, 25, 7),
        data_movement.gather(4, 0, 25, 7, root=1),
        data_movement.scatter(4, 0, 25, 7),
        data_movement.scatter(4, 0, 25, 7, root=1),
        copies.broadcast(4, 0, 100, 7),
        copies.broadcast(4, 0, 100, 7, root=1),
        copies.broadcast(4, 0, 101, 7),
        copies.barrier(4, 0),
        copies.barrier(5, 0),
    ]
    assert len({plan.signature for plan in plans}) == len(plans)


def test_signature_never_changes() -> None:
    """Peers of other Python versions must agree: the number is part of the protocol."""
    assert hierarchical.all_reduce(4, 1, 100, 7).signature == GOLDEN_SIGNATURE


def test_counts_may_be_a_list_or_one_number() -> None:
    assert copies.all_gather(3, 1, [5, 5, 5], 2) == copies.all_gather(3, 1, 5, 2)


def test_transpose_of_three() -> None:
    plan = hierarchical.all_reduce(3, 0, 25, 5, order=(2, 0, 1))
    assert segments(25, 3, 5) == ((0, 10), (10, 10), (20, 5))
    assert plan.slots == (
        Slot(2, 0, 5, dests=(Edge(1, 2),), own=Own.INPUT, own_offset=20, target=Target.NONE),
        Slot(0, 0, 10, dests=(Edge(2, 0),), own=Own.INPUT, own_offset=0, target=Target.NONE),
        Slot(
            1,
            10,
            10,
            sources=(1, 2),
            dests=(Edge(1, 4), Edge(2, 4)),
            combine=Combine.ADD,
            own=Own.INPUT,
            own_offset=10,
            finish=Finish.MEAN,
        ),
        Slot(5, 20, 5, sources=(1,), missing=Missing.OWN),
        Slot(3, 0, 10, sources=(2,), missing=Missing.OWN),
    )


def test_ring_of_three() -> None:
    plan = ring.all_reduce(3, 0, 25, 5, order=(2, 0, 1), missing=Missing.KEEP)
    assert plan.slots == (
        Slot(1, 0, 10, dests=(Edge(1, 1),), own=Own.INPUT, own_offset=10, target=Target.NONE),
        Slot(
            0,
            0,
            10,
            sources=(2,),
            dests=(Edge(1, 0),),
            combine=Combine.ADD,
            own=Own.INPUT,
            own_offset=0,
            target=Target.SCRATCH,
        ),
        Slot(
            2,
            20,
            5,
            sources=(2,),
            dests=(Edge(1, 5),),
            combine=Combine.ADD,
            own=Own.INPUT,
            own_offset=20,
            finish=Finish.MEAN,
        ),
        Slot(4, 10, 10, sources=(2,), dests=(Edge(1, 4),)),
        Slot(3, 0, 10, sources=(2,)),
    )
    assert plan.scratch_elements == 10


def test_broadcast_is_a_tree_of_two_children() -> None:
    plans = [copies.broadcast(7, rank, 5, 5, root=2) for rank in range(7)]
    fed = {plan.rank: plan.slots[0].sources for plan in plans}
    assert fed == {2: (), 3: (2,), 4: (2,), 5: (3,), 6: (3,), 0: (4,), 1: (4,)}


@given(elements=st.integers(0, 10**7), parts=st.integers(1, 40), per_packet=st.integers(1, 5000))
def test_segments_partition(elements: int, parts: int, per_packet: int) -> None:
    cut = segments(elements, parts, per_packet)
    assert len(cut) == parts
    end = 0
    for offset, length in cut:
        assert offset == end
        assert length == 0 or offset % per_packet == 0
        end = offset + length
    assert end == elements
    packets = [-(-length // per_packet) for _, length in cut]
    assert max(packets) - min(packets) <= 1
    assert sum(packets) == -(-elements // per_packet)


@given(
    seed=st.integers(0, 2**64 - 1),
    group=st.integers(0, 2**32 - 1),
    op=st.integers(0, 2**32 - 1),
    world=st.integers(1, 100),
)
def test_order_is_a_permutation(seed: int, group: int, op: int, world: int) -> None:
    assert sorted(draw_order(seed, group, op, world)) == list(range(world))


def test_orders_are_equally_frequent() -> None:
    n = 12000
    seen = Counter(draw_order(1, 0, op, 4) for op in range(n))
    assert set(seen) == set(permutations(range(4)))
    p = 1 / 24
    assert all(abs(times - n * p) < 4 * sqrt(n * p * (1 - p)) for times in seen.values())


@pytest.mark.parametrize("change", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_order_depends_on_everything(change: tuple[int, int, int]) -> None:
    assert draw_order(*change, 20) != draw_order(1, 1, 1, 20)


@cache
def declared() -> FFI:
    ffi = FFI()
    for header in HEADERS:
        text = header.read_text(encoding="utf-8")
        found = re.search(r"/\* cdef begin \*/(.*?)/\* cdef end \*/", text, re.DOTALL)
        assert found is not None
        ffi.cdef(found.group(1))
    return ffi


@settings(max_examples=50)
@given(
    slots=st.lists(
        st.builds(
            Slot,
            number=st.integers(0, MOST_SLOTS - 1),
            offset=st.integers(0, 2**64 - 1),
            length=st.integers(0, 2**64 - 1),
            sources=st.lists(st.integers(0, 2**16 - 1), max_size=4).map(tuple),
            dests=st.lists(
                st.builds(Edge, st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1)), max_size=4
            ).map(tuple),
            combine=st.sampled_from(Combine),
            own=st.sampled_from(Own),
            own_offset=st.integers(0, 2**64 - 1),
            feed=st.integers(0, 2**16 - 1),
            finish=st.sampled_from(Finish),
            target=st.sampled_from(Target),
            missing=st.sampled_from(Missing),
            level=st.integers(0, 255),
        ),
        max_size=5,
    )
)
def test_c_reads_what_was_encoded(slots: list[Slot]) -> None:
    ffi = declared()
    plan = dataclasses.replace(copies.barrier(2, 0), slots=tuple(slots))
    slot_bytes, edge_bytes = encode(plan)
    assert ffi.sizeof("lc_slot_desc") == 48
    assert len(slot_bytes) == 48 * len(slots)
    assert len(edge_bytes) == 4 * sum(len(slot.sources) + len(slot.dests) for slot in slots)
    table = ffi.from_buffer("lc_slot_desc[]", slot_bytes)
    edges = ffi.from_buffer("lc_edge[]", edge_bytes)
    for row, slot in zip(table, slots, strict=True):
        first, middle = row.first_edge, row.first_edge + row.n_sources
        sources = [(edges[i].peer, edges[i].slot) for i in range(first, middle)]
        dests = [(edges[i].peer, edges[i].slot) for i in range(middle, middle + row.n_dests)]
        assert sources == [(peer, 0) for peer in slot.sources]
        assert dests == [(edge.peer, edge.slot) for edge in slot.dests]
        for field in dataclasses.fields(Slot):
            if field.name in {"sources", "dests"}:
                continue
            assert getattr(row, field.name) == getattr(slot, field.name), field.name


def test_c_and_python_name_the_same_numbers() -> None:
    ffi = declared()
    for prefix, kind, name in (
        ("LC_", Combine, "enum lc_combine"),
        ("LC_OWN_", Own, "enum lc_own"),
        ("LC_FINISH_", Finish, "enum lc_finish"),
        ("LC_TARGET_", Target, "enum lc_target"),
        ("LC_MISSING_", Missing, "enum lc_missing"),
    ):
        assert ffi.typeof(name).relements == {prefix + m.name: m.value for m in kind}


def test_encode_refuses_what_does_not_fit() -> None:
    plan = copies.broadcast(2, 0, 5, 5)
    slot = dataclasses.replace(plan.slots[0], number=MOST_SLOTS)
    with pytest.raises(ValueError, match="broadcast plan doesn't fit"):
        encode(dataclasses.replace(plan, slots=(slot,)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ring.all_reduce(0, 0, 5, 5), "world is 0, wanted 1 to 32767"),
        (lambda: ring.all_reduce(40000, 0, 5, 5), "world is 40000, wanted"),
        (lambda: ring.all_reduce(3, 3, 5, 5), "rank is 3, wanted 0 to 2"),
        (lambda: ring.all_reduce(3, -1, 5, 5), "rank is -1, wanted 0 to 2"),
        (lambda: hierarchical.all_reduce(3, 0, 5, 0), "elements_per_packet is 0, wanted 1 or more"),
        (lambda: hierarchical.all_reduce(3, 0, -5, 5), "elements is -5, wanted 0 or more"),
        (
            lambda: hierarchical.all_reduce(3, 0, 2.5, 5),  # type: ignore[arg-type]
            "elements is 2.5, wanted an integer",
        ),
        (
            lambda: hierarchical.all_reduce(3, 0, 5, 5, order=(0, 1, 1)),
            r"order is \(0, 1, 1\), wanted one or more of 0 to 2, each once",
        ),
        (lambda: ring.all_reduce(3, 0, 5, 5, order=(0, 1)), r"order is \(0, 1\), wanted each"),
        (
            lambda: reduce_scatter.reduce_scatter(3, 0, (1, 2), 5),
            "counts has 2 entries, wanted one per rank: 3",
        ),
        (
            lambda: reduce_scatter.reduce_scatter(3, 0, (1, 2, -3), 5),
            r"counts\[2\] is -3, wanted 0 or more",
        ),
        (
            lambda: reduce_scatter.reduce_scatter(3, 0, 1, 5, finish=Finish.NONE),
            "finish is .*NONE.*, wanted MEAN or STRATIFIED or WEIGHTED",
        ),
        (lambda: data_movement.gather(3, 0, 1, 5, root=3), "root is 3, wanted 0 to 2"),
        (lambda: data_movement.scatter(3, 0, 1, 5, root=-1), "root is -1, wanted 0 to 2"),
        (lambda: copies.broadcast(3, 0, 1, 5, root=7), "root is 7, wanted 0 to 2"),
        (
            lambda: data_movement.all_to_all_uneven(2, 1, (4, 4), (4, 5), 5),
            r"receive_counts\[1\] is 5, wanted 4",
        ),
    ],
)
def test_bad_arguments_are_named(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


GOLDEN_SIGNATURE = 10219530412125821805
