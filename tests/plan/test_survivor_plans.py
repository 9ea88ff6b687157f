"""Plans for the ranks that are left, against what the reference executor makes of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from lossycoll.plan import (
    Algorithm,
    Finish,
    Missing,
    Plan,
    algorithms,
    copies,
    data_movement,
    draw_order,
    hierarchical,
    leave_out,
    reduce_scatter,
    rename,
)
from tests.oracle import reference_executor
from tests.oracle.codec import Array

WORLD, PER_PACKET = 5, 4
GROUPS = [
    members
    for n in (1, 2, 3, 4, 5)
    for members in combinations(range(WORLD), n)
    if sum(members) % 2
]


def no_loss(*stream: int) -> np.ndarray:
    return np.zeros(stream[-2], dtype=np.bool_)


def run(plans: dict[int, Plan], inputs: dict[int, Array], outputs: dict[int, Array]) -> None:
    """Runs what the members do; the dead do nothing at all."""
    some = next(iter(plans.values()))
    everyone = [
        plans.get(rank, replace(some, rank=rank, slots=(), in_elements=0, out_elements=0))
        for rank in range(WORLD)
    ]
    nothing = np.zeros(0, next(iter(inputs.values())).dtype)
    dtype = "bytes" if nothing.dtype == np.uint8 else "f32"
    results = reference_executor.execute(
        everyone,
        [inputs.get(rank, nothing) for rank in range(WORLD)],
        [outputs.get(rank, nothing) for rank in range(WORLD)],
        dtype=dtype,
        lost=no_loss,
        rounds=0,
        scale=float(WORLD),
    )
    for rank, output in outputs.items():
        output[:] = results[rank].output


def rows(members: tuple[int, ...], count: int) -> dict[int, Array]:
    return {rank: np.arange(count, dtype=np.float32) + 100 * rank for rank in members}


@pytest.mark.parametrize(
    ("algorithm", "members"),
    [
        pytest.param(algorithm, members, id=f"{algorithm.name}-{members}")
        for algorithm in algorithms("all_reduce")
        for members in GROUPS
        if algorithm.serves(len(members))
    ],
)
def test_an_all_reduce_is_the_survivors_mean_times_the_world(
    algorithm: Algorithm, members: tuple[int, ...]
) -> None:
    count = 37
    how = {"order": None, "missing": Missing.OWN, "finish": Finish.MEAN}
    if algorithm.draws_order:
        how["order"] = draw_order(1, 2, 3, len(members))
    plans = {
        rank: rename(algorithm.build(len(members), i, count, PER_PACKET, **how), members, WORLD)
        for i, rank in enumerate(members)
    }
    inputs = rows(members, count)
    outputs = {rank: array.copy() for rank, array in inputs.items()}
    run(plans, inputs, outputs)
    mean = np.mean([inputs[rank] for rank in members], axis=0)
    for rank in members:
        np.testing.assert_allclose(outputs[rank], WORLD * mean, rtol=1e-5)


@pytest.mark.parametrize("members", GROUPS)
def test_a_reduce_scatter_is_the_survivors_mean_times_the_world(members: tuple[int, ...]) -> None:
    count = 9
    plans = {
        rank: leave_out(reduce_scatter.reduce_scatter(WORLD, rank, count, PER_PACKET), members)
        for rank in members
    }
    inputs = rows(members, count * WORLD)
    outputs = {rank: np.zeros(count, np.float32) for rank in members}
    run(plans, inputs, outputs)
    mean = np.mean([inputs[rank] for rank in members], axis=0)
    for rank in members:
        want = WORLD * mean[count * rank : count * (rank + 1)]
        np.testing.assert_allclose(outputs[rank], want, rtol=1e-5)


@pytest.mark.parametrize("members", GROUPS)
@pytest.mark.parametrize("fanout", [2, WORLD])
def test_a_broadcast_reaches_the_survivors(members: tuple[int, ...], fanout: int) -> None:
    for root in range(len(members)):
        plans = {
            rank: rename(
                copies.broadcast(len(members), i, 10, PER_PACKET, root=root, fanout=fanout),
                members,
                WORLD,
            )
            for i, rank in enumerate(members)
        }
        inputs = {rank: np.full(10, rank, np.uint8) for rank in members}
        outputs = {rank: array.copy() for rank, array in inputs.items()}
        run(plans, inputs, outputs)
        for rank in members:
            assert set(outputs[rank]) == {members[root]}


@pytest.mark.parametrize("members", GROUPS)
def test_the_parts_of_the_dead_stay_as_they_were(members: tuple[int, ...]) -> None:
    count = 6
    builders = {
        "all_gather": copies.all_gather,
        "all_to_all": data_movement.all_to_all,
    }
    for name, build in builders.items():
        plans = {
            rank: leave_out(build(WORLD, rank, count, PER_PACKET), members) for rank in members
        }
        size = count if name == "all_gather" else count * WORLD
        inputs = {rank: np.full(size, rank + 1, np.uint8) for rank in members}
        outputs = {rank: np.full(count * WORLD, 99, np.uint8) for rank in members}
        run(plans, inputs, outputs)
        for rank in members:
            parts = outputs[rank].reshape(WORLD, count)
            for sender in range(WORLD):
                want = sender + 1 if sender in members else 99
                assert set(parts[sender]) == {want}, (name, rank, sender)


def test_plans_of_other_survivors_are_other_collectives() -> None:
    plan = hierarchical.all_reduce(3, 0, 10, PER_PACKET)
    found = {rename(plan, members, WORLD).signature for members in combinations(range(WORLD), 3)}
    assert len(found | {plan.signature}) == 11
    whole = copies.all_gather(WORLD, 0, 10, PER_PACKET)
    assert leave_out(whole, (0, 1)).signature != leave_out(whole, (0, 2)).signature


@pytest.mark.parametrize("members", [(), (1, 0, 2), (0, 0, 1), (0, 1, 5), (-1, 0, 1), (0, 1)])
def test_members_that_cannot_be_are_refused(members: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="wanted"):
        rename(hierarchical.all_reduce(3, 0, 10, PER_PACKET), members, WORLD)
    with pytest.raises(ValueError, match="wanted"):
        leave_out(copies.all_gather(WORLD, 4, 10, PER_PACKET), members)
