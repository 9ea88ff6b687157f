"""The theory of docs/theory.md, by measurement: engines with real sockets, and the reference.

Tolerances are several times what the sizes here leave to chance; seeds are fixed. Each criterion is
shown to have power: what it must reject is measured as well.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.theory import __main__ as command
from benchmarks.theory import anchors, formulas, hosts, optireduce, orders
from benchmarks.theory import experiments as theory
from benchmarks.theory import owners as theory_owners
from benchmarks.theory import ranks as theory_ranks
from benchmarks.theory import smaller as theory_smaller
from benchmarks.theory.experiments import EXECUTORS
from benchmarks.theory.owners import chosen
from benchmarks.theory.parity import left_by_engines, left_missing
from benchmarks.theory.spread import between, ways
from lossycoll.plan import Finish
from lossycoll.plan.faults import Inject, parse
from lossycoll.plan.sets import Code
from tests.oracle.codec import Array
from tests.oracle.masks import lost
from tests.oracle.parity import shape_of
from tests.support.harness import run_good

STANDARD_ERRORS = 4.0
shared = pytest.mark.xdist_group("samples of the theory")  # they are kept in the process
OPERATIONS = {"sockets": 300, "reference": 150}
"""They give the same samples, and the reference is slower."""
ALGORITHMS = ("ring", "transpose", "reduce_scatter")
UNEVEN = "loss=0.1,link=3-0:0.5,link=3-1:0.5,link=0-2:0.4"
UNBIASED = {
    "even": ("loss=0.3", None, None),
    "bursts": ("loss=0.3,burst=4", None, None),
    "a rank dead": ("loss=0.3", 1, None),
    "a rank dead, bursts": ("loss=0.3,burst=4", 1, None),
    "uneven, weighted": (UNEVEN, None, Finish.WEIGHTED),
    "uneven, bursts, weighted": (f"{UNEVEN},burst=4", None, Finish.WEIGHTED),
}


long = pytest.mark.long
by_executor = pytest.mark.parametrize(
    "executor", [pytest.param("sockets", marks=long), "reference"]
)
"""The short suite has the reference; that engines give the same samples, it shows by SAMPLE."""
OFTEN = ("bursts", "a rank dead, bursts", "uneven, bursts, weighted")
SAMPLE = ("a rank dead, bursts", "transpose")
assert (*EXECUTORS,) == ("sockets", "reference")


def unbiased() -> Iterator[Any]:
    for case, algorithm, executor in product(UNBIASED, ALGORITHMS, EXECUTORS):
        reference = executor == "reference" and case in OFTEN
        often = reference or (case, algorithm) == SAMPLE
        yield pytest.param(case, algorithm, executor, marks=() if often else long)


def of_both() -> Iterator[Any]:
    for at in product(UNBIASED, ALGORITHMS):
        yield pytest.param(*at, marks=() if at == SAMPLE else long)


@functools.cache
def samples_of(executor: str, algorithm: str, case: str) -> Array:
    faults, dead, finish = UNBIASED[case]
    return theory.means(
        executor, algorithm, f"{faults},seed=41", OPERATIONS[executor], dead=dead, finish=finish
    )


@shared
@pytest.mark.parametrize(("case", "algorithm", "executor"), list(unbiased()))
def test_the_mean_is_unbiased(case: str, algorithm: str, executor: str) -> None:
    samples = samples_of(executor, algorithm, case)
    true = theory.truth(4, UNBIASED[case][1])
    assert theory.standard_errors(samples, true) < STANDARD_ERRORS


@shared
@pytest.mark.parametrize(("case", "algorithm"), list(of_both()))
def test_both_executors_give_the_same_samples(case: str, algorithm: str) -> None:
    engines, reference = (samples_of(executor, algorithm, case) for executor in EXECUTORS)
    engines = engines[: len(reference)]
    if algorithm == "reduce_scatter" and UNBIASED[case][1] is not None:
        # Which the reference runs as a smaller world, whose slots have other numbers.
        assert not np.array_equal(engines, reference, equal_nan=True)
    elif UNBIASED[case][2] == Finish.WEIGHTED:  # weights aren't whole: the order of sums shows
        np.testing.assert_allclose(engines, reference, rtol=1e-6)
    else:
        np.testing.assert_array_equal(engines, reference)


@by_executor
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_uneven_links_bias_the_mean_by_count(algorithm: str, executor: str) -> None:
    samples = theory.means(executor, algorithm, f"{UNEVEN},seed=41", OPERATIONS[executor])
    over_segments = samples.mean(axis=2, keepdims=True)
    assert theory.standard_errors(over_segments, theory.truth(4)) > STANDARD_ERRORS


@long
@pytest.mark.parametrize("algorithm", ["ring", "transpose"])
def test_so_do_owners_that_are_never_redrawn_where_a_rank_is_dead(algorithm: str) -> None:
    samples = theory.means("sockets", algorithm, "loss=0.3,seed=41", 100, dead=1, redrawn=False)
    assert theory.standard_errors(samples, theory.truth(4, 1)) > 2 * STANDARD_ERRORS


@long
def test_by_how_much_uneven_links_bias_it() -> None:
    """Against the sum over all that can arrive, for owners that stay (of a transpose: segment s is
    rank s's)."""
    faults = parse(UNEVEN)
    samples = theory.means("sockets", "reduce_scatter", f"{UNEVEN},seed=41", 300,
                           finish=Finish.MEAN)  # fmt: skip
    for rank in range(4):
        others = [(theory.own(r), faults.loss_of(r, rank)) for r in range(4) if r != rank]
        alone = np.prod([loss for _, loss in others])
        expected = formulas.count_mean_uneven(theory.own(rank), others)
        # Packets to which no other contributed are not among the samples.
        expected = (expected - alone * theory.own(rank)) / (1 - alone)
        assert theory.standard_errors(samples[:, rank : rank + 1], expected) < STANDARD_ERRORS


@by_executor
@pytest.mark.parametrize(("world", "loss"), [(2, 0.3), (4, 0.1), (4, 0.4)])
def test_variance_grows_as_predicted(world: int, loss: float, executor: str) -> None:
    got = theory.variance(executor, world, loss, 200)
    want = formulas.inflation(loss, world)
    assert got == pytest.approx(want, rel=0.03)
    assert abs(want - 1) > 2 * 0.03 * want  # no inflation would be found out


@by_executor
def test_variance_of_a_reduce_scatter_whose_owners_have_a_stratum_of_their_own(
    executor: str,
) -> None:
    want = formulas.stratified_variance(0.3, 4)
    got = theory.variance(executor, 4, 0.3, 200, algorithm="reduce_scatter")
    assert got == pytest.approx(want, rel=0.03)
    by_count = theory.variance(
        executor, 4, 0.3, 200, algorithm="reduce_scatter", finish=Finish.MEAN
    )
    assert abs(want - by_count) > 2 * 0.03 * want  # which is less, and biased


@pytest.mark.parametrize("ranks", [(2, 2, 2, 2), (4, 2, 1, 1)])
def test_lost_partial_sums_cost_the_variance_of_lost_hosts(ranks: tuple[int, ...]) -> None:
    got = hosts.variance(ranks, 0.4, 40)
    assert got == pytest.approx(formulas.inflation(0.4, len(ranks)), rel=0.04)
    got = hosts.variance(ranks, 0.4, 60, algorithm="reduce_scatter", mean=1.0)
    want = sum(
        n * formulas.stratified_sums_variance(0.4, n, (*ranks[:i], *ranks[i + 1 :]), 1.0)
        for i, n in enumerate(ranks)
    ) / sum(ranks)
    assert got == pytest.approx(want, rel=0.06)
    assert (want > 2) == (len(set(ranks)) > 1), "hosts of several sizes cost more"


@by_executor
def test_weights_cost_variance_in_proportion_to_the_mean(executor: str) -> None:
    for mean in (0.0, 2.0):
        by_count = theory.variance(executor, 4, 0.3, 100, mean=mean)
        assert by_count == pytest.approx(formulas.inflation(0.3, 4), rel=0.03)
        weighted = theory.variance(executor, 4, 0.3, 100, mean=mean, finish=Finish.WEIGHTED)
        assert weighted == pytest.approx(formulas.weighted_variance(0.3, 4, mean), rel=0.06)


@by_executor
@pytest.mark.parametrize("loss", [0.2, 0.4])
def test_drift_of_broadcast_parameters(loss: float, executor: str) -> None:
    got = theory.broadcast(executor, loss, 360)
    assert got.drift == pytest.approx(formulas.broadcast_drift(loss), rel=0.05)
    assert got.drift != pytest.approx(formulas.broadcast_drift_published(loss), rel=0.15)
    assert got.from_owner == pytest.approx(formulas.owner_distance(loss), rel=0.05)
    older = got.ages[::-1].cumsum()[::-1] / got.ages.sum()
    for steps in range(5):
        tail = formulas.staleness_tail(loss, steps)
        # What is old now is likely old at the next step: fewer observations than ages.
        error = (tail * (1 + loss) / (1 - loss) / got.ages.sum()) ** 0.5
        assert older[steps] == pytest.approx(tail, abs=STANDARD_ERRORS * error)


@by_executor
def test_drift_of_broadcast_parameters_that_have_a_direction(executor: str) -> None:
    got = theory.broadcast(executor, 0.3, 360, mean=0.5)
    assert got.drift == pytest.approx(formulas.broadcast_drift(0.3, mean=0.5), rel=0.06)
    assert got.drift != pytest.approx(formulas.broadcast_drift(0.3), rel=0.3)


@by_executor
@pytest.mark.parametrize("burst", [2.0, 8.0])
def test_drift_where_losses_come_in_runs_of_steps(burst: float, executor: str) -> None:
    got = theory.bursts(executor, 0.2, burst, 20)
    assert got == pytest.approx(formulas.burst_drift(0.2, burst), rel=0.08)
    assert got != pytest.approx(formulas.broadcast_drift(0.2), rel=0.3)


LOSS, STEPS, PERIOD, EVERY = 0.3, 5000, 16, 47
"""EVERY has no factor of PERIOD: all parts of a sweep are looked at."""


def check_steps(
    world: int, at: list[int], free: list[float], bound: list[float], missed: float
) -> None:
    assert at[-1] > STEPS - EVERY
    per_step = formulas.free_drift_per_step(LOSS, world)
    # Straight through 0: the slope of the first half, and of all, is that of one step.
    half = len(at) // 2
    assert free[half] / at[half] == pytest.approx(per_step, rel=0.12)
    assert free[-1] / at[-1] == pytest.approx(per_step, rel=0.12)
    flat = np.array(bound[2:])
    want = formulas.bounded_drift(per_step, PERIOD, world, missed)
    for part in np.array_split(flat, 2):  # and it doesn't grow
        assert part.mean() == pytest.approx(want, rel=0.12)
    assert flat.max() < 3 * want
    assert free[-1] > 10 * flat.max()  # what would be found out without DriftBound


def check_states(got: dict[str, list[float]]) -> None:
    """It is as large in the first half as in the second, and as predicted."""
    for name, beta in theory_ranks.BETAS.items():
        want = formulas.state_drift(LOSS, 3, name, beta)
        series = np.array(got[name][10:])  # exp_avg_sq takes a thousand steps
        for part in np.array_split(series, 2):
            assert part.mean() == pytest.approx(want, rel=0.15), name
        assert series.max() < 3 * want, name


@long
def test_drift_of_reduced_gradients_over_5000_steps_with_real_ranks() -> None:
    env = theory_ranks.env(
        LOSS, elements=2400, steps=STEPS, period=PERIOD, every=EVERY, repairs=[0]
    )
    for got in run_good(theory_ranks.steps, 3, env, timeout=220):
        assert got["injected"] > STEPS
        check_steps(3, got["at"], *got["drifts"], LOSS)
        check_states(got["states"])


@long
def test_drift_of_reduced_gradients_over_5000_steps_in_the_reference() -> None:
    got = theory.steps_in_reference(LOSS, STEPS, PERIOD, EVERY, world=3, packets=48)
    check_steps(3, got.at, got.free, got.bound, LOSS)


# ---- parity ----


@pytest.mark.parametrize(
    ("n", "code", "loss", "burst"),
    [(192, Code(64, 25), 0.2, 1.0), (192, Code(64, 25), 0.2, 8.0), (2979, Code(64, 6), 0.05, 1.0)],
)
def test_parity_leaves_what_is_predicted(n: int, code: Code, loss: float, burst: float) -> None:
    found = left_missing(n, code, loss, burst, drawn=120_000)
    assert abs(found.measured - found.predicted) < STANDARD_ERRORS * found.error
    # A few rows less are told apart from it, so the samples have power.
    less = left_missing(n, Code(code.size, code.rows - 4), loss, burst, drawn=120_000)
    assert less.measured - found.predicted > STANDARD_ERRORS * found.error


def test_published_parity_is_within_its_errors() -> None:
    """Of streams whose sets have unlike sizes as well."""
    found = json.loads(command.JSON.read_text())["parity"]
    cells = [cell for row in found for cell in row["by_packets"].values()]
    assert len(cells) == 24
    for cell in cells:
        assert abs(cell["measured"] - cell["predicted"]) < STANDARD_ERRORS * cell["error"]


def test_fewer_owners_leave_less_missing_and_send_more() -> None:
    assert theory_owners.busiest(8, 8) == 1
    by_owners = {}
    for owners in (8, 2):
        _, means = theory_owners.seconds(owners, 0, 125e6)
        packets = theory_owners.HARD_PACKETS * theory_owners.WORLD // owners
        parity = theory_owners.parity_of(means, packets)
        assert 0 < parity < 0.6
        drawn = left_missing(packets, means.code, **theory_owners.HARD, drawn=120_000)
        assert abs(drawn.measured - means.expected) < STANDARD_ERRORS * drawn.error
        by_owners[owners] = means.expected
    assert by_owners[2] < by_owners[8] / 2
    assert theory_owners.busiest(8, 2) > 2


def drawn_at(every: int, packets: int, loss: float, burst: float) -> Iterator[NDArray[np.bool_]]:
    """The losses of streams of so many packets that stand ``every`` apart in a chain."""
    for op in range(3000):
        yield lost(Inject(loss=loss, burst=burst, seed=3), 0, op, 0, 1, 0, packets * every)[::every]


def test_bursts_of_a_port_are_short_in_its_streams() -> None:
    """Runs of what is lost among every 7th packet of a chain."""
    runs = gone = 0
    for here in drawn_at(7, 60, 0.2, 8.0):
        runs += int(here[0]) + int((here[1:] & ~here[:-1]).sum())
        gone += int(here.sum())
    # Ends of streams cut runs.
    assert abs(gone / runs / between(0.2, 8.0, 7) - 1) < 0.04
    assert between(0.2, 8.0, 1) == pytest.approx(8)
    assert between(0.2, 8.0, 1000) == pytest.approx(1.25)
    assert gone / runs < 3


def test_what_a_burst_leaves_by_what_a_set_is_spread_over() -> None:
    """As drawn, for 24 packets: in a stream of a path, of a port, and of one owner of eight."""
    found = ways(24, 0.2, 8.0)
    left = {way: cell["left"] for way, cell in found.items()}
    for way, n, every, run in (
        ("stream", 24, 1, 8.0),
        ("port", 24, 7, between(0.2, 8.0, 7)),
        ("owners", 192, 1, 8.0),
    ):
        code = chosen(n, 0.2, run).code
        shape, shares = shape_of(code, n), []
        assert len(shape.of_parity) / n == found[way]["parity"] <= 0.6
        for here in drawn_at(every, n + len(shape.of_parity), 0.2, 8.0):
            back = shape.recover(here[:n], np.zeros(n, bool), ~here[n:])
            shares.append((here[:n] & ~back).mean())
        error = np.std(shares) / np.sqrt(len(shares))
        assert abs(np.mean(shares) - left[way]) < STANDARD_ERRORS * error, way
    assert left["owners"] < 0.2 * left["stream"]
    assert left["stream"] < left["in order"] < 0.2
    assert left["port"] < left["buckets"] < left["stream"]


@pytest.mark.parametrize(
    ("packets", "finer", "loss", "burst"),
    [(24, 1, 0.2, 8.0), (24, 3, 0.2, 5.0), (193, 1, 0.4, 8.0), (193, 3, 0.4, 8.0)],
)
def test_smaller_packets_leave_what_the_chain_says(
    packets: int, finer: int, loss: float, burst: float
) -> None:
    found = theory_smaller.cell(packets, finer, loss, burst, streams=1500)
    assert abs(found["drawn"] - found["left"]) < STANDARD_ERRORS * found["error"]
    assert found["drawn"] > 0
    whole = theory_smaller.cell(packets, 1, loss, burst, streams=2)
    if finer > 1:
        assert found["left"] < 0.6 * whole["left"]
        assert found["bytes"] < 1.16 * whole["bytes"]


def test_constants_of_averaged_models() -> None:
    a1, a2 = anchors.mixing(0.1, 8)
    assert (a1, a2) == pytest.approx((0.10198, 0.02306), abs=5e-6)
    found = anchors.mixed(0.1, 8, calls=10)
    for name, value in (("a1", a1), ("a2", a2)):
        assert abs(found[name] - value) < STANDARD_ERRORS * found[f"{name}_error"], name


@pytest.mark.parametrize("algorithm", optireduce.ALGORITHMS)
def test_errors_of_algorithms_that_send_once(algorithm: str) -> None:
    """Over sockets. A ring's error is four times a transpose's, and a server's is a transpose's."""
    predicted = {a: optireduce.by_count(a, 0.1, optireduce.WORLD) for a in optireduce.ALGORITHMS}
    error, deviation = optireduce.measured("sockets", algorithm, "loss=0.1", 40)
    assert abs(error - predicted[algorithm]) < STANDARD_ERRORS * deviation
    others = [value for value in predicted.values() if value != predicted[algorithm]]
    assert others
    assert all(abs(error - other) > 10 * deviation for other in others)


def test_optireduces_ring_is_between_what_zero_filling_predicts() -> None:
    ring, transpose = (optireduce.PUBLISHED[a] for a in (optireduce.RING, optireduce.TRANSPOSE))

    def ratio(mean: float) -> float:
        few = 1e-4
        over, under = (
            optireduce.zero_filled(a, few, 8, mean) for a in (optireduce.RING, optireduce.TRANSPOSE)
        )
        return over / under

    assert ratio(0.0) == pytest.approx(4, abs=0.01)  # half of the ranks
    assert ratio(0.0) < ring / transpose < ratio(1e3)


@pytest.mark.parametrize("order", orders.ORDERS)
def test_orders_give_a_bucket_back(order: str) -> None:
    flat = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    there, back = orders.ORDERS[order]
    torch.testing.assert_close(back(there(flat, 16), 1000, 16), flat)
    sent = there(flat, 16).double()
    assert float(sent.square().sum()) == pytest.approx(float(flat.double().square().sum()))


def test_scattered_losses_add_up_less_in_rows() -> None:
    """Over sockets, in bursts. Errors of elements are the same; those of sums are a third at most,
    by the hook's order as by a rotation."""
    found = {
        order: orders.errors("sockets", order, "loss=0.1,burst=8", 40) for order in orders.ORDERS
    }
    predicted = optireduce.by_count(optireduce.TRANSPOSE, 0.1, orders.WORLD)
    for one in found.values():
        assert abs(one["element"] - predicted) < STANDARD_ERRORS * one["element_error"]
    plain = found["as they are"]["row"]
    assert all(found[order]["row"] < plain / 3 for order in ("dispersed", "rotated"))


@long
def test_engines_leave_it_too() -> None:
    drawn = left_missing(192, Code(64, 25), 0.2, 8.0, drawn=400_000)
    found = left_by_engines(192, Code(64, 25), 0.2, 8.0, sent=200_000)
    assert abs(found - drawn.predicted) < STANDARD_ERRORS * 2**0.5 * drawn.error
