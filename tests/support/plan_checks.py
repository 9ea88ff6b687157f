"""What must hold for the plans of every algorithm; each check takes one case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lossycoll.plan import Combine, Finish, Missing, Own, Plan, Slot, Target, Topology
from tests.oracle.reference_executor import execute
from tests.support.plan_cases import ELEMENTS_PER_PACKET, Case, counts

Array = NDArray[Any]


def every(case: Case) -> list[list[Plan]]:
    """All ranks' plans, for each world and count."""
    return [
        case.plans(world, count, ELEMENTS_PER_PACKET)
        for world in case.worlds
        for count in counts(world)
    ]


def streams_have_two_ends_of_one_length(case: Case) -> None:
    streams = 0
    for plans in every(case):
        sent = Counter(
            (plan.rank, edge.peer, edge.slot, slot.length)
            for plan in plans
            for slot in plan.slots
            for edge in slot.dests
        )
        awaited = Counter(
            (sender, plan.rank, slot.number, slot.length)
            for plan in plans
            for slot in plan.slots
            for sender in slot.sources
        )
        assert sent == awaited
        assert not sent or max(sent.values()) == 1
        assert all(sender != receiver for sender, receiver, _, _ in sent)
        streams += len(sent)
    assert streams > 0


def outputs_are_covered_once(case: Case) -> None:
    covered = 0
    for plans in every(case):
        for plan in plans:
            ranges = sorted(
                (slot.offset, slot.offset + slot.length)
                for slot in plan.slots
                if slot.target == Target.OUT
            )
            if not ranges:
                # In place, and nothing to change: a single rank, or the root of a broadcast.
                assert (
                    plan.out_elements == 0
                    or (case.way.in_place and plan.world == 1)
                    or plan.collective == "broadcast"
                )
                continue
            assert (ranges[0][0], ranges[-1][1]) == (0, plan.out_elements)
            assert all(before[1] == after[0] for before, after in pairwise(ranges))
            covered += 1
    assert covered > 0


def slots_keep_the_rules_of_the_model(case: Case) -> None:
    for plans in every(case):
        for plan in plans:
            numbers = [slot.number for slot in plan.slots]
            assert len(set(numbers)) == len(numbers)
            scratch = []
            for slot in plan.slots:
                assert slot.length > 0
                assert 0 <= slot.number < 1 << 16
                assert slot.sources or slot.own
                assert len(set(slot.sources)) == len(slot.sources)
                if slot.combine == Combine.COPY:
                    assert len(slot.sources) + (slot.own != Own.NONE) == 1
                if slot.target == Target.NONE:
                    assert not slot.sources
                    assert slot.dests
                if slot.own == Own.INPUT:
                    assert 0 <= slot.own_offset <= plan.in_elements - slot.length
                if slot.finish != Finish.NONE:
                    assert slot.combine == Combine.ADD
                if slot.target == Target.SCRATCH:
                    scratch.append((slot.offset, slot.offset + slot.length))
            scratch.sort()
            assert all(before[1] <= after[0] for before, after in pairwise(scratch))
            assert max((end for _, end in scratch), default=0) == plan.scratch_elements


def signature_is_equal_on_all_ranks(case: Case) -> None:
    for plans in every(case):
        assert len({plan.signature for plan in plans}) == 1
        assert 0 <= plans[0].signature < 1 << 64


def signature_tells_calls_apart(case: Case) -> None:
    """It differs with all that must agree among ranks, and with nothing that need not."""
    _, options = case.way.arguments(3, 0, 100)
    base = case.plan(3, 1, 100, 7)
    others = [case.plan(4, 1, 100, 7), case.plan(3, 1, 100, 8)]
    # No rank knows all counts of an uneven exchange, and a barrier has none.
    if case.algorithm.collective not in ("all_to_all_uneven", "barrier"):
        others.append(case.plan(3, 1, 101, 7))
    if "order" in options and case.algorithm.draws_order:
        others += [case.plan(3, 1, 100, 7, order=order) for order in ((2, 1, 0), (1, 0, 2))]
    if "missing" in options:
        others.append(case.plan(3, 1, 100, 7, missing=Missing.KEEP))
    if "root" in options:
        others.append(case.plan(3, 1, 100, 7, root=1))
    if "fanout" in options:
        others.append(case.plan(3, 1, 100, 7, fanout=3))
    if case.algorithm.levels:
        shapes = [("abb", "xxx", 1), ("aab", "xxy", 1), ("abb", "xxx", 2)]
        others += [case.plan(3, 1, 100, 7, topology=Topology.of_labels(*of)) for of in shapes]
    assert len({plan.signature for plan in (base, *others)}) == 1 + len(others)
    if "finish" in options:
        for finish in (Finish.MEAN, Finish.WEIGHTED):
            assert case.plan(3, 1, 100, 7, finish=finish).signature == base.signature


def plans_are_named_as_they_are_registered(case: Case) -> None:
    algorithm = case.algorithm
    for plan in case.plans(case.worlds[-1], 100, ELEMENTS_PER_PACKET):
        assert plan.algorithm == algorithm.name
        # The uneven exchange is a collective of its own to those who call it, not to peers.
        assert plan.collective == algorithm.collective.removesuffix("_uneven")


def _longest_chain(plans: Sequence[Plan]) -> int:
    """Packets of the longest chain of packets that wait for one another."""
    slots = {(plan.rank, slot.number): slot for plan in plans for slot in plan.slots}
    feeds = {
        (edge.peer, edge.slot, rank): number
        for (rank, number), slot in slots.items()
        for edge in slot.dests
    }

    @cache
    def depth(rank: int, number: int) -> int:
        sources = slots[rank, number].sources
        return max((1 + depth(s, feeds[rank, number, s]) for s in sources), default=0)

    return max((depth(*key) for key in slots), default=0)


def _partial_sum(slot: Slot) -> bool:
    """Whether it is a sum of several contributions that is not finished, for others."""
    return slot.combine == Combine.ADD and slot.finish == Finish.NONE


def promises_are_kept(case: Case) -> None:
    """What the algorithm is registered with follows from its plans, in every world up to 8."""
    algorithm = case.algorithm
    summed, relayed = False, False
    for world in case.worlds:
        # Of this size all parts are equal.
        count = 4 * ELEMENTS_PER_PACKET * world
        plans = case.plans(world, count, ELEMENTS_PER_PACKET)
        slots = [slot for plan in plans for slot in plan.slots]
        summed |= any(_partial_sum(slot) for slot in slots)
        relayed |= any(slot.dests and (slot.sources or slot.own == Own.SLOT) for slot in slots)
        if "uneven" in case.name or case.tiers:
            continue
        largest = max(max(plan.in_elements, plan.out_elements) for plan in plans)
        sent = [sum(len(slot.dests) * slot.length for slot in plan.slots) for plan in plans]
        assert _longest_chain(plans) == algorithm.steps(world), world
        assert max(sent) / largest == pytest.approx(algorithm.traffic(world)), world
    if case.tiers and algorithm.relays:  # by hosts, it adds up on the way or passes on
        assert relayed
        assert summed == (case.way.adds or algorithm.partial_sums)
    else:
        assert summed == algorithm.partial_sums
        assert relayed != algorithm.direct


def buffers(
    plans: Sequence[Plan], in_place: bool, seed: int = 0, dtype: Any = np.float32
) -> tuple[list[Array], list[Array]]:
    """Small integers to send, and outputs that hold 255 where nothing is written."""
    rng = np.random.default_rng(seed)
    inputs: list[Array] = [rng.integers(0, 100, p.in_elements).astype(dtype) for p in plans]
    if in_place:
        return [array.copy() for array in inputs], [array.copy() for array in inputs]
    return inputs, [np.full(p.out_elements, 255).astype(dtype) for p in plans]


def nothing(_s: int, _r: int, _slot: int, n_packets: int, _round: int) -> NDArray[np.bool_]:
    """Loses nothing."""
    return np.zeros(n_packets, dtype=np.bool_)


def never(*_stream: int) -> NDArray[np.bool_]:
    """Must not be asked."""
    raise AssertionError("a reliable operation asked what was lost")


def lossless_is_what_numpy_says(case: Case) -> None:
    for world in case.worlds:
        for count in counts(world):
            plans = case.plans(world, count, ELEMENTS_PER_PACKET)
            for rounds, loss in ((None, never), (0, nothing)):
                inputs, outputs = buffers(plans, case.way.in_place, seed=count)
                results = execute(plans, inputs, outputs, "f32", world, loss, rounds)
                expected = case.way.expected(inputs)
                for result, output, want in zip(results, outputs, expected, strict=True):
                    assert result.output is output
                    # Integers below 2**24: float32 sums are exact, the mean's two factors aren't.
                    np.testing.assert_allclose(output, want, rtol=1e-6)
                    assert result.packets_missing == 0
                    assert result.own_filled == result.kept == result.alone == 0


def one_buffer_may_be_both(case: Case) -> None:
    """For a collective in place."""
    plans = case.plans(4, 100, ELEMENTS_PER_PACKET)
    inputs, _ = buffers(plans, True)
    expected = case.way.expected([array.copy() for array in inputs])
    execute(plans, inputs, inputs, "f32", 4, never, None)
    np.testing.assert_allclose(inputs, expected, rtol=1e-6)


def bytes_move(case: Case) -> None:
    """For a collective that adds nothing."""
    plans = case.plans(5, 100, ELEMENTS_PER_PACKET)
    inputs, outputs = buffers(plans, case.way.in_place, dtype=np.uint8)
    execute(plans, inputs, outputs, "bytes", 5, nothing, 0)
    for output, want in zip(outputs, case.way.expected(inputs), strict=True):
        np.testing.assert_array_equal(output, want)


PLAN_CHECKS = (
    streams_have_two_ends_of_one_length,
    outputs_are_covered_once,
    slots_keep_the_rules_of_the_model,
    signature_is_equal_on_all_ranks,
    signature_tells_calls_apart,
    plans_are_named_as_they_are_registered,
    promises_are_kept,
)


def reference_checks(case: Case) -> list[Callable[[Case], None]]:
    """Checks of the reference executor that are meant for the case."""
    checks: list[Callable[[Case], None]] = [lossless_is_what_numpy_says]
    if case.way.in_place:
        checks.append(one_buffer_may_be_both)
    if not case.way.adds:
        checks.append(bytes_move)
    return checks
