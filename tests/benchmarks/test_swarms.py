"""What lost packets leave of means over a swarm's groups: docs/theory.md's formulas against the
reference executor, and against peers over loopback that lose the same packets.

Seeds are fixed, but for the numbers that a directory draws for its groups, by which packets are
lost. Each criterion is shown to have power.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from benchmarks.theory import formulas, swarms
from benchmarks.theory.swarms import Share
from lossycoll.plan.faults import parse
from lossycoll.runtime.swarm.member import SwarmMember

STANDARD_ERRORS = 4.0


def away(found: Share, wanted: float) -> float:
    """In standard errors."""
    return abs(found.value - wanted) / found.error


@pytest.mark.parametrize("loss", [0.05, 0.1, 0.3])
@pytest.mark.parametrize(
    ("shape", "peers"), [((4, 4), 16), ((2, 4), 8), ((8,), 8), ((4, 2), 7)], ids=str
)
def test_what_a_round_leaves(shape: tuple[int, ...], peers: int, loss: float) -> None:
    found = swarms.single_rounds("reference", shape, peers, loss, count=32_000, rounds=4)
    for sizes, one in found.items():
        distance, moved = formulas.one_round(loss, sizes)
        assert away(one.variance, distance - moved) < STANDARD_ERRORS
        assert away(one.moved, moved) < STANDARD_ERRORS
        if one.lean is not None:
            assert away(one.lean, formulas.lean_to_owner(loss, sizes[0])) < STANDARD_ERRORS
        # The same without loss, or with half of it, would be found out.
        for other in (0.0, loss / 2):
            distance, moved = formulas.one_round(other, sizes)
            assert away(one.variance, distance - moved) > STANDARD_ERRORS
            assert away(one.moved, moved) > STANDARD_ERRORS
    assert found


def test_without_loss_it_leaves_groups_less_one_over_peers_less_one() -> None:
    for sizes in ((4, 4, 4, 4), (2, 2), (4, 3), (2, 2, 2, 1), (8,), (5, 1)):
        peers, groups = sum(sizes), len(sizes)
        exact = (groups - 1) / (peers - 1)
        assert formulas.one_round(0.0, sizes) == pytest.approx((exact, 0.0), abs=1e-12)
        assert formulas.lean_to_owner(0.0, sizes[0]) == 0


@pytest.mark.parametrize(
    ("shape", "rounds", "loss"), [((4, 4), 6, 0.3), ((2, 2, 2), 6, 0.3), ((2, 2, 2), 3, 0.1)]
)
def test_what_rounds_leave_on_full_grids(shape: tuple[int, ...], rounds: int, loss: float) -> None:
    peers = int(np.prod(shape))
    found, sizes = swarms.many_rounds(
        "reference", shape, peers, loss, count=16_000, rounds=rounds, runs=16
    )
    product = swarms.products(loss, sizes)
    wanted = formulas.full_grid(loss, shape, rounds)
    for number, (one, (distance, moved)) in enumerate(zip(found, wanted, strict=True)):
        # Beside packets, how lines are shuffled is drawn: a few times in each run.
        assert one.variance.value == pytest.approx(distance - moved, rel=0.08)
        assert one.moved.value == pytest.approx(moved, rel=0.06)
        if number:  # groups that were drawn at random would leave more
            assert product[number] > 1.05 * one.variance.value
    # And the mean moves in later rounds than the first.
    assert found[-1].moved.value > 1.3 * found[0].moved.value
    first, moved = formulas.one_round(loss, (shape[0],) * (peers // shape[0]))
    assert wanted[0] == pytest.approx((first, moved))


def test_full_grids_are_exact_without_loss() -> None:
    for shape in ((4, 4), (2, 2, 2), (2, 3)):
        *before, last = formulas.full_grid(0.0, shape, len(shape))
        assert last == pytest.approx((0.0, 0.0), abs=1e-12)
        assert min(distance for distance, _ in before) > 0.1


def noted(
    groups: list[tuple[int, tuple[int, ...]]],
    member: SwarmMember,
    paths: Any,
    group: Any,
    *rest: Any,
) -> tuple[float, float]:
    """Notes a group's number and members."""
    groups.append((group.number, tuple(one.number for one in group.members)))
    return SwarmMember._exchange(member, paths, group, *rest)


@pytest.mark.parametrize(("shape", "peers"), [((2, 2, 2), 8), ((4, 2), 7)], ids=str)
def test_peers_over_loopback_leave_the_same(shape: Sequence[int], peers: int) -> None:
    """Number by number, with the packets lost that injection draws for their groups."""
    loss, rng = 0.2, np.random.default_rng(6)
    groups: list[tuple[int, tuple[int, ...]]] = []
    with swarms.averaging("sockets", shape, peers, loss) as swarm:
        assert isinstance(swarm, swarms.Members)
        for member in swarm.members:
            member._exchange = partial(noted, groups, member)  # type: ignore[method-assign]
        for _ in range(2 * len(shape)):
            values = swarms.draw(rng, peers, 30_000)
            wanted = [one.copy() for one in values]
            groups.clear()
            swarm.average(values)
            for number, members in set(groups):
                mine = [wanted[peer] for peer in members]
                swarms.exchange(mine, parse(swarms.injected(loss)), number, swarm.per_packet)
            for one, other in zip(values, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_peers_over_loopback_leave_what_is_predicted() -> None:
    found = swarms.single_rounds("sockets", (2, 2, 2), 8, 0.0, count=100_000, rounds=3)
    assert found[2, 2, 2, 2].variance.value == pytest.approx(3 / 7, rel=0.01)
    found = swarms.single_rounds("sockets", (2, 2, 2), 8, 0.3, count=100_000, rounds=3)
    one = found[2, 2, 2, 2]
    distance, moved = formulas.one_round(0.3, (2, 2, 2, 2))
    assert away(one.variance, distance - moved) < STANDARD_ERRORS + 1
    assert away(one.moved, moved) < STANDARD_ERRORS + 1
    assert one.variance.value > 3 / 7 * 1.3
