"""The reference executor against numpy, against slow loops that spell the rules out, and against
the truth in the mean over many operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from math import sqrt
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lossycoll.plan import (
    Edge,
    Finish,
    Missing,
    Plan,
    copies,
    draw_order,
    hierarchical,
    packet_count,
    reduce_scatter,
    ring,
    segments,
)
from lossycoll.plan.faults import Inject
from tests.oracle.codec import WIRE_TYPES
from tests.oracle.masks import lost
from tests.oracle.reference_executor import Lost, RankResult, execute
from tests.support.plan_cases import CASES, Case
from tests.support.plan_checks import buffers, nothing, reference_checks

Array = NDArray[Any]


def everything(_s: int, _r: int, _slot: int, n_packets: int, _round: int) -> NDArray[np.bool_]:
    return np.ones(n_packets, dtype=np.bool_)


@pytest.mark.parametrize(
    ("case", "check"),
    [
        pytest.param(case, check, id=f"{case.name}-{check.__name__}")
        for case in CASES
        for check in reference_checks(case)
    ],
)
def test_every_algorithm(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


# The rules, spelt out: one packet and one rank at a time, in Python floats.

PER = 3


class Streams:
    """Asks ``lost`` once per stream and round, then answers for single packets."""

    def __init__(self, loss: Lost, rounds: int) -> None:
        self.loss, self.rounds = loss, rounds

    def arrives(self, sender: int, receiver: int, slot: int, k: int, n: int) -> bool:
        tries = range(self.rounds + 1)
        return any(not self.loss(sender, receiver, slot, n, round)[k] for round in tries)


def packets(offset: int, length: int) -> list[slice]:
    end = offset + length
    return [slice(b, min(b + PER, end)) for b in range(offset, end, PER)]


def slow_transpose(
    inputs: list[Array], order: tuple[int, ...], scale: float, missing: Missing, streams: Streams
) -> list[Array]:
    world = len(inputs)
    outputs = [array.astype(np.float64) for array in inputs]
    for s, (offset, length) in enumerate(segments(len(inputs[0]), world, PER)):
        owner = order[s]
        cut = packets(offset, length)
        for k, here in enumerate(cut):
            counted = [
                r for r in range(world) if r == owner or streams.arrives(r, owner, s, k, len(cut))
            ]
            mean = sum(inputs[r][here].astype(np.float64) for r in counted) / len(counted)
            for r in range(world):
                if r == owner or streams.arrives(owner, r, world + s, k, len(cut)):
                    outputs[r][here] = mean * scale
                elif missing == Missing.OWN:
                    outputs[r][here] = inputs[r][here].astype(np.float64) * scale
                elif missing == Missing.ZERO:
                    outputs[r][here] = 0.0
    return outputs


def slow_ring(
    inputs: list[Array], order: tuple[int, ...], scale: float, missing: Missing, streams: Streams
) -> list[Array]:
    world = len(inputs)
    outputs = [array.astype(np.float64) for array in inputs]
    for s, (offset, length) in enumerate(segments(len(inputs[0]), world, PER)):
        path = [order[(s + i) % world] for i in range(world)]
        cut = packets(offset, length)
        for k, here in enumerate(cut):
            addends = [inputs[path[0]][here].astype(np.float64)]
            for sender, receiver in pairwise(path):
                own = inputs[receiver][here].astype(np.float64)
                came = streams.arrives(sender, receiver, s, k, len(cut))
                addends = [*addends, own] if came else [own]
            outputs[path[-1]][here] = sum(addends) / len(addends) * scale
            there = True
            for sender, receiver in zip([path[-1], *path], path[:-1], strict=False):
                there = there and streams.arrives(sender, receiver, world + s, k, len(cut))
                if there:
                    outputs[receiver][here] = outputs[path[-1]][here]
                elif missing == Missing.OWN:
                    outputs[receiver][here] = inputs[receiver][here].astype(np.float64) * scale
                elif missing == Missing.ZERO:
                    outputs[receiver][here] = 0.0
    return outputs


LOSSES = [
    Inject(loss=0.2, seed=1),
    Inject(loss=0.5, seed=2),
    Inject(loss=0.3, burst=4, seed=3),
    Inject(loss=1.0, seed=4),
]
by_loss = pytest.mark.parametrize("inject", LOSSES, ids=str)


@by_loss
@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("missing", Missing)
@pytest.mark.parametrize(
    ("build", "slow"), [(hierarchical.all_reduce, slow_transpose), (ring.all_reduce, slow_ring)]
)
def test_lossy_all_reduce_is_the_rule(
    inject: Inject, rounds: int, missing: Missing, build: Callable[..., Plan], slow: Any
) -> None:
    differs = 0
    for world, elements in ((2, 31), (3, 100), (5, 100), (8, 40), (4, 5)):
        loss = partial(lost, inject, 7, world)
        order = draw_order(1, 2, elements, world)
        plans = [
            build(world, rank, elements, PER, order=order, missing=missing) for rank in range(world)
        ]
        inputs, outputs = buffers(plans, True, seed=world)
        execute(plans, inputs, outputs, "f32", 2.5, loss, rounds)
        wanted = slow(inputs, order, 2.5, missing, Streams(loss, rounds))
        np.testing.assert_allclose(outputs, wanted, rtol=1e-6)
        mean = np.mean(inputs, axis=0) * 2.5
        differs += sum(not np.allclose(output, mean) for output in outputs)
    assert differs > 0, "nothing was lost: the test has tested nothing"


@by_loss
@pytest.mark.parametrize("build", [hierarchical.all_reduce, ring.all_reduce])
def test_a_weighted_mean_is_the_rule(inject: Inject, build: Callable[..., Plan]) -> None:
    """What is added is multiplied by the weight of the link it came by; the divisor is fixed."""
    world, elements, scale, divisor = 4, 100, 3.0, 5.0
    loss = partial(lost, inject, 7, 1)
    weights = 1.0 + np.arange(world * world).reshape(world, world) / 8
    order = draw_order(1, 2, 3, world)
    plans = [
        build(world, r, elements, PER, order=order, missing=Missing.ZERO, finish=Finish.WEIGHTED)
        for r in range(world)
    ]
    inputs, outputs = buffers(plans, True)
    results = execute(
        plans, inputs, outputs, "f32", scale, loss, 0, weights=weights, divisor=divisor
    )
    streams = Streams(loss, 0)
    for s, (offset, length) in enumerate(segments(elements, world, PER)):
        cut = packets(offset, length)
        for k, here in enumerate(cut):
            parts = [inputs[r][here].astype(np.float64) for r in range(world)]
            if build is ring.all_reduce:
                path = [order[(s + i) % world] for i in range(world)]
                owner, total = path[-1], parts[path[0]]
                for sender, receiver in pairwise(path):
                    came = streams.arrives(sender, receiver, s, k, len(cut))
                    total = parts[receiver] + came * weights[receiver, sender] * total
            else:
                owner = order[s]
                total = parts[owner] + sum(
                    weights[owner, r] * parts[r]
                    for r in range(world)
                    if r != owner and streams.arrives(r, owner, s, k, len(cut))
                )
            np.testing.assert_allclose(outputs[owner][here], total / divisor * scale, rtol=1e-5)
    assert sum(result.packets_missing for result in results) > 0
    assert sum(result.zero_filled for result in results) > 0


@by_loss
@pytest.mark.parametrize("finish", [Finish.MEAN, Finish.STRATIFIED])
def test_lossy_reduce_scatter_is_the_rule(inject: Inject, finish: Finish) -> None:
    world, scale = 4, 4.0
    sizes = (31, 0, 7, 30)
    plans = [
        reduce_scatter.reduce_scatter(world, r, sizes, PER, finish=finish) for r in range(world)
    ]
    inputs, outputs = buffers(plans, False)
    loss = partial(lost, inject, 1, 2)
    results = execute(plans, inputs, outputs, "f32", scale, loss, 0)
    begin = 0
    missing = 0
    for rank, size in enumerate(sizes):
        chunk = [array[begin : begin + size].astype(np.float64) for array in inputs]
        begin += size
        alone = 0
        for k, here in enumerate(packets(0, size)):
            n = packet_count(size, PER)
            came = [
                chunk[j][here]
                for j in range(world)
                if j != rank and not loss(j, rank, rank, n, 0)[k]
            ]
            missing += world - 1 - len(came)
            own = chunk[rank][here]
            if finish == Finish.MEAN:
                want = (own + sum(came)) / (1 + len(came)) * scale
            elif came:
                want = (own + (world - 1) * sum(came) / len(came)) / world * scale
            else:
                alone += 1
                want = own * scale
            np.testing.assert_allclose(outputs[rank][here], want, rtol=1e-6)
            if size:
                assert results[rank].counts[rank][k] == 1 + len(came)
        assert results[rank].alone == alone
    assert missing == sum(result.packets_missing for result in results) > 0


def test_figures_when_everything_is_lost() -> None:
    world, packets_each = 4, 2
    elements = world * packets_each * PER

    def run(build: Callable[..., Plan], count: int, **options: Any) -> list[RankResult]:
        plans = [build(world, rank, count, PER, **options) for rank in range(world)]
        in_place = plans[0].collective in {"all_reduce", "broadcast"}
        inputs, outputs = buffers(plans, in_place)
        results = execute(plans, inputs, outputs, "f32", world, everything, 3)
        for given, result in zip(inputs, results, strict=True):
            if in_place and result.own_filled:
                np.testing.assert_array_equal(result.output, given * world)
        return results

    for result in run(hierarchical.all_reduce, elements):
        assert (result.contribution_packets, result.contributions) == (2, 2)
        assert result.contributions_min == 1
        assert (result.own_filled, result.kept, result.alone) == (6, 0, 0)
        assert result.packets_missing == 3 * 2 + 3 * 2
    for result in run(ring.all_reduce, elements, missing=Missing.KEEP):
        assert (result.contribution_packets, result.contributions) == (2, 2)
        assert (result.own_filled, result.kept) == (0, 6)
        assert result.packets_missing == 3 * 2 + 3 * 2
    for result in run(reduce_scatter.reduce_scatter, packets_each * PER):
        assert (result.alone, result.contributions, result.contributions_min) == (2, 2, 1)
    for rank, result in enumerate(run(copies.all_gather, packets_each * PER)):
        assert (result.kept, result.contribution_packets) == (6, 0)
        chunk = slice(rank * 2 * PER, (rank + 1) * 2 * PER)
        assert np.all(np.delete(result.output, chunk) == 255)
        assert np.all(result.output[chunk] < 100)


def test_figures_count_contributions() -> None:
    """One packet of rank 2 doesn't reach the owner of segment 0, nor its mean rank 1."""

    def loss(sender: int, receiver: int, slot: int, n: int, _round: int) -> NDArray[np.bool_]:
        gone = np.zeros(n, dtype=np.bool_)
        gone[1] = (sender, receiver, slot) in {(2, 0, 0), (0, 1, 3)}
        return gone

    plans = [hierarchical.all_reduce(3, rank, 27, PER) for rank in range(3)]
    inputs, outputs = buffers(plans, True)
    results = execute(plans, inputs, outputs, "f32", 3, loss, 0)
    assert results[0].missing[0, 2].tolist() == [1]
    assert results[0].counts[0].tolist() == [3, 2, 3]
    assert (results[0].contribution_packets, results[0].contributions) == (3, 8)
    assert results[0].contributions_min == 2
    assert results[1].missing[3, 0].tolist() == [1]
    assert results[1].own_filled == 1
    np.testing.assert_array_equal(outputs[1][3:6], inputs[1][3:6] * 3)
    np.testing.assert_allclose(outputs[2][3:6], (inputs[0] + inputs[1])[3:6] * 1.5)
    assert results[2].packets_missing == 0


def test_figures_cover_all_slots_that_finish() -> None:
    """No builder finishes two ranges at one rank; a plan may."""

    def loss(_s: int, _r: int, slot: int, n: int, _round: int) -> NDArray[np.bool_]:
        return np.full(n, slot == 1)

    good = [hierarchical.all_reduce(2, rank, 2 * PER, PER) for rank in range(2)]
    mean = good[0].slots[1]
    here = [
        dataclasses.replace(mean, number=n, offset=n * PER, own_offset=n * PER, dests=())
        for n in range(2)
    ]
    there = [dataclasses.replace(good[1].slots[0], number=n, dests=(Edge(0, n),)) for n in range(2)]
    plans = [
        dataclasses.replace(plan, slots=tuple(slots))
        for plan, slots in zip(good, (here, there), strict=True)
    ]
    for slots in (here, here[::-1]):
        plans[0] = dataclasses.replace(plans[0], slots=tuple(slots))
        result = execute(plans, *buffers(plans, True), "f32", 1, loss, 0)[0]
        assert (result.contribution_packets, result.contributions) == (2, 3)
        assert result.contributions_min == 1


def test_what_a_rank_never_got_it_does_not_send_on() -> None:
    def loss(sender: int, _r: int, _slot: int, n: int, _round: int) -> NDArray[np.bool_]:
        gone = np.zeros(n, dtype=np.bool_)
        gone[1] = sender == 0
        return gone

    plans = [copies.broadcast(7, rank, 9, PER) for rank in range(7)]
    inputs, outputs = buffers(plans, True)
    results = execute(plans, inputs, outputs, "f32", 1, loss, 4)
    for rank in range(1, 7):
        assert [packet.tolist() for packet in results[rank].missing.values()] == [[1]]
        assert results[rank].kept == 1
        np.testing.assert_array_equal(outputs[rank][3:6], inputs[rank][3:6])
        np.testing.assert_array_equal(outputs[rank][6:], inputs[0][6:])


def test_repair_sends_again_what_was_lost() -> None:
    def loss(_s: int, _r: int, _slot: int, n: int, round: int) -> NDArray[np.bool_]:
        return np.asarray(np.arange(n) >= round)  # round r gets packets below r through

    plans = [copies.all_gather(2, rank, 4 * PER, PER) for rank in range(2)]
    for rounds in range(6):
        inputs, outputs = buffers(plans, False)
        results = execute(plans, inputs, outputs, "f32", 1, loss, rounds)
        assert results[0].missing[1, 1].tolist() == list(range(min(rounds, 4), 4))


# Types.


def bf16(values: Sequence[float]) -> Array:
    """Exact only: the upper half of each float32."""
    bits = np.array(values, dtype=np.float32).view(np.uint32)
    assert not np.any(bits & 0xFFFF)
    return (bits >> 16).astype(np.uint16)


def test_bf16_rounds_to_nearest_even() -> None:
    kind = WIRE_TYPES["bf16"]
    tie_down, tie_up, above = 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20
    big = np.float32(3.4e38)
    values = np.array([1, tie_down, tie_up, above, -tie_up, big, np.inf, -0.0], dtype=np.float32)
    want = bf16([1, 1, 1 + 2**-6, 1 + 2**-7, -1 - 2**-6, np.inf, np.inf, -0.0])
    np.testing.assert_array_equal(kind.narrow(values), want)
    assert np.isnan(kind.widen(kind.narrow(np.array([np.nan], dtype=np.float32))))[0]
    # A NaN whose payload is in the lower half must not become infinity.
    assert np.isnan(kind.widen(kind.narrow(np.array([0x7F800001], np.uint32).view(np.float32))))[0]
    everything_finite = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    wide = kind.widen(everything_finite)
    numbers = ~np.isnan(wide)
    np.testing.assert_array_equal(kind.narrow(wide)[numbers], everything_finite[numbers])


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_sums_are_rounded_at_each_hop(dtype: str) -> None:
    """1 added twice to a number whose neighbour is 2 away vanishes if it is rounded each time."""
    big = {"f16": 2048.0, "bf16": 256.0}[dtype]
    values = [big, 1.0, 1.0]

    def run(build: Callable[..., Plan]) -> float:
        plans = [build(3, rank, 1, 1, order=(0, 1, 2)) for rank in range(3)]
        arrays: list[Array] = [
            bf16([v]) if dtype == "bf16" else np.array([v], dtype=np.float16) for v in values
        ]
        execute(plans, arrays, arrays, dtype, 3, nothing, 0)
        return float(WIRE_TYPES[dtype].widen(arrays[0])[0])

    assert run(ring.all_reduce) == big
    assert run(hierarchical.all_reduce) == big + 2


def test_f16_sums_in_float32() -> None:
    """60000 + 60000 is beyond float16, but their mean isn't."""
    plans = [hierarchical.all_reduce(2, rank, 4, 2) for rank in range(2)]
    arrays = [np.full(4, 60000, dtype=np.float16) for _ in range(2)]
    execute(plans, arrays, arrays, "f16", 1, nothing, 0)
    assert all(np.all(array == np.float16(60000)) for array in arrays)


def test_f64_keeps_its_digits() -> None:
    plans = [ring.all_reduce(2, rank, 4, 2) for rank in range(2)]
    arrays = [np.full(4, 1 + 2.0**-50) for _ in range(2)]
    execute(plans, arrays, arrays, "f64", 2, nothing, 0)
    assert all(np.all(array == 2 + 2.0**-49) for array in arrays)


def test_lost_nan_does_not_spread() -> None:
    plans = [hierarchical.all_reduce(2, rank, 8, 2) for rank in range(2)]
    arrays = [np.full(8, np.nan, dtype=np.float32), np.ones(8, dtype=np.float32)]
    execute(plans, arrays, arrays, "f32", 1, everything, 0)
    assert np.all(arrays[1] == 1)


# Refusals.


def test_plans_that_do_not_fit_are_refused() -> None:
    good = [copies.broadcast(3, rank, 5, 5) for rank in range(3)]
    inputs, outputs = buffers(good, True)

    def run(plans: list[Plan], dtype: str = "f32", rounds: int | None = 0) -> None:
        execute(plans, inputs, outputs, dtype, 1, nothing, rounds)

    def changed(rank: int, **fields: Any) -> list[Plan]:
        slot = dataclasses.replace(good[rank].slots[0], **fields)
        plans = list(good)
        plans[rank] = dataclasses.replace(good[rank], slots=(slot,))
        return plans

    run(good)
    with pytest.raises(ValueError, match="from rank 0 to slot 0 of 1 has no receiver"):
        run(changed(1, number=1))
    with pytest.raises(ValueError, match="has 5 elements, wanted the receiver's 4"):
        run(changed(1, length=4))
    with pytest.raises(ValueError, match="slot 0 of rank 2 waits for rank 0"):
        run(changed(0, dests=good[0].slots[0].dests[:1]))
    with pytest.raises(ValueError, match="two senders"):
        run(changed(0, dests=good[0].slots[0].dests * 2))
    circle = [changed(0, sources=(2,))[0], good[1], changed(2, dests=(Edge(0, 0),))[2]]
    with pytest.raises(ValueError, match="wait for each other"):
        run(circle)
    with pytest.raises(ValueError, match="two slots of one number"):
        run([*good[:2], dataclasses.replace(good[2], slots=good[2].slots * 2)])
    with pytest.raises(ValueError, match="rank 2 means another collective than rank 0"):
        run([*good[:2], copies.broadcast(3, 2, 6, 5)])
    with pytest.raises(ValueError, match="plan 0 is of rank 1 of 3, wanted 0 of 3"):
        run([good[1], good[0], good[2]])
    with pytest.raises(ValueError, match="3 inputs, 3 outputs: wanted one of each"):
        run(good[:2])
    with pytest.raises(ValueError, match=r"input of rank 0 is float32.* wanted float64"):
        run(good, "f64")
    with pytest.raises(ValueError, match="dtype is 'f8', wanted one of f32"):
        run(good, "f8")
    with pytest.raises(ValueError, match="rounds is -1, wanted 0 or more"):
        run(good, rounds=-1)


def test_bytes_are_never_added_or_scaled() -> None:
    plans = [hierarchical.all_reduce(2, rank, 5, 5) for rank in range(2)]
    arrays = [np.zeros(5, dtype=np.uint8) for _ in range(2)]
    with pytest.raises(ValueError, match="dtype is bytes, which can't be added"):
        execute(plans, arrays, arrays, "bytes", 2, nothing, 0)
    moves = [copies.broadcast(2, rank, 5, 5) for rank in range(2)]
    slot = dataclasses.replace(moves[1].slots[0], missing=Missing.OWN)
    moves[1] = dataclasses.replace(moves[1], slots=(slot,))
    with pytest.raises(ValueError, match="can't be scaled: wanted KEEP"):
        execute(moves, arrays, arrays, "bytes", 2, everything, 0)


# Statistics: fixed data, different on each rank, and the mean over many operations.

WORLD = 4
ELEMENTS = WORLD * 24
STAT_PER = 2
OPERATIONS = 1000
STAT_LOSSES = [
    Inject(loss=p, burst=burst, seed=11) for p in (0.1, 0.3, 0.5) for burst in (1.0, 6.0)
]


def data(elements: int) -> list[Array]:
    """Rank r holds values around 10 * r**2, so that weighing ranks unequally shows."""
    rng = np.random.default_rng(5)
    return [10.0 * r * r + rng.normal(size=elements) for r in range(WORLD)]


def scores(errors: Array) -> Array:
    """Standard errors between each column's mean and 0; rows are independent operations."""
    spread = errors.std(axis=0, ddof=1)
    assert np.all(spread > 0), "nothing was lost: the test has tested nothing"
    return np.asarray(errors.mean(axis=0) / (spread / sqrt(len(errors))))


def all_reduce_errors(
    build: Callable[..., Plan], inject: Inject, redraw: bool
) -> tuple[Array, Array]:
    """(of what was reduced, where it was; of the mean over all ranks): (operations, segments)."""
    inputs = data(ELEMENTS)
    truth = np.mean(inputs, axis=0)
    cut = segments(ELEMENTS, WORLD, STAT_PER)
    reduced, averaged = [], []
    for op in range(OPERATIONS):
        order = draw_order(inject.seed, 0, op if redraw else 0, WORLD)
        plans = [build(WORLD, rank, ELEMENTS, STAT_PER, order=order) for rank in range(WORLD)]
        outputs = [array.copy() for array in inputs]
        results = execute(plans, inputs, outputs, "f64", 1.0, partial(lost, inject, 0, op), 0)
        # The rank that finished segment s is the one with its counts.
        owner = {s: rank for rank, result in enumerate(results) for s in result.counts}
        overall = np.mean(outputs, axis=0) - truth
        error = [
            (outputs[owner[s]] - truth)[offset : offset + length].mean()
            for s, (offset, length) in enumerate(cut)
        ]
        reduced.append(error)
        averaged.append([overall[offset : offset + length].mean() for offset, length in cut])
    return np.array(reduced), np.array(averaged)


by_loss_often = pytest.mark.parametrize(
    "inject",
    [
        pytest.param(one, marks=() if one.loss == 0.3 else pytest.mark.long, id=str(one))
        for one in STAT_LOSSES
    ],
)
"""Every one in the long suite, the middle one with and without bursts in the short one."""


@pytest.mark.parametrize(
    ("build", "inject"),
    [
        pytest.param(
            build,
            one,
            marks=() if one.loss == 0.3 and (one.burst > 1) == bursts else pytest.mark.long,
            id=f"{name}-{one}",
        )
        for (build, name, bursts), one in product(
            [(hierarchical.all_reduce, "transpose", True), (ring.all_reduce, "ring", False)],
            STAT_LOSSES,
        )
    ],
)
def test_all_reduce_is_unbiased(build: Callable[..., Plan], inject: Inject) -> None:
    reduced, averaged = all_reduce_errors(build, inject, redraw=True)
    assert np.abs(scores(reduced)).max() < 4
    assert np.abs(scores(averaged)).max() < 4


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(hierarchical.all_reduce, id="transpose"),
        pytest.param(ring.all_reduce, id="ring", marks=pytest.mark.long),
    ],
)
def test_a_fixed_order_is_biased(build: Callable[..., Plan]) -> None:
    """Why the order is redrawn, and that the test above would notice."""
    reduced, averaged = all_reduce_errors(build, Inject(loss=0.3, seed=11), redraw=False)
    assert np.abs(scores(reduced)).max() > 8
    assert np.abs(scores(averaged)).max() > 8


def reduce_scatter_errors(inject: Inject, finish: Finish) -> tuple[Array, int]:
    """Errors of packets that another rank contributed to, (operations, ranks); others' number."""
    count = 40
    inputs = data(count * WORLD)
    truth = np.mean(inputs, axis=0).reshape(WORLD, count)
    plans = [
        reduce_scatter.reduce_scatter(WORLD, r, count, STAT_PER, finish=finish)
        for r in range(WORLD)
    ]
    errors, alone = [], 0
    for op in range(OPERATIONS):
        outputs = [np.zeros(count) for _ in range(WORLD)]
        results = execute(plans, inputs, outputs, "f64", 1.0, partial(lost, inject, 0, op), 0)
        row = []
        for rank, result in enumerate(results):
            kept = np.repeat(result.counts[rank] > 1, STAT_PER)
            # Summed over a fixed number of packets: a mean over those kept would be a ratio.
            row.append(np.where(kept, outputs[rank] - truth[rank], 0).mean())
            alone += result.alone
        errors.append(row)
    return np.array(errors), alone


@by_loss_often
def test_reduce_scatter_is_unbiased_per_rank(inject: Inject) -> None:
    errors, alone = reduce_scatter_errors(inject, Finish.STRATIFIED)
    assert np.abs(scores(errors)).max() < 4
    # No other rank's packet arrives with chance p**3; bursts make the count vary, not its mean.
    expected = inject.loss**3 * OPERATIONS * WORLD * 20
    assert 0.5 * expected < alone < 1.5 * expected


def test_a_plain_mean_is_biased_in_reduce_scatter() -> None:
    errors, _ = reduce_scatter_errors(Inject(loss=0.3, seed=11), Finish.MEAN)
    assert np.abs(scores(errors)).max() > 8


def test_mean_number_of_contributions() -> None:
    """1 + (N - 1) (1 - p) at the owner of a transpose."""
    p, n = 0.3, 400
    inject = Inject(loss=p, seed=2)
    plans = [hierarchical.all_reduce(WORLD, rank, 4 * n, 1) for rank in range(WORLD)]
    arrays = [np.zeros(4 * n, dtype=np.float32) for _ in range(WORLD)]
    results = execute(plans, arrays, arrays, "f32", 1, partial(lost, inject, 0, 0), 0)
    total = sum(result.contribution_packets for result in results)
    assert total == 4 * n
    mean = sum(result.contributions for result in results) / total
    error = sqrt((WORLD - 1) * p * (1 - p) / total)
    assert abs(mean - (1 + (WORLD - 1) * (1 - p))) < 4 * error
