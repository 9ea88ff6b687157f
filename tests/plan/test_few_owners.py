"""An all-reduce of which some of the ranks alone own parts: longer streams, the same means."""

from __future__ import annotations

from functools import partial
from itertools import permutations

import numpy as np
import pytest

from lossycoll.plan import Finish, Plan, Topology, draw_order, hierarchical, owner_count, ring
from lossycoll.plan.faults import Inject
from lossycoll.plan.order import LONGER_MOST
from tests.oracle.masks import lost
from tests.oracle.reference_executor import execute
from tests.plan.test_reference_executor import scores

WORLD, PER_PACKET, PACKETS = 4, 2, 12
HOSTS = Topology.of_labels("aabc", "xxxx", 2)


def plans_of(order: tuple[int, ...], topology: Topology | None = None) -> list[Plan]:
    count = PACKETS * PER_PACKET
    how = {"order": order, "topology": topology}
    return [
        hierarchical.all_reduce(WORLD, rank, count, PER_PACKET, **how)  # type: ignore[arg-type]
        for rank in range(WORLD)
    ]


def inputs() -> list[np.ndarray]:
    """No two sets of ranks have the same mean."""
    return [np.full(PACKETS * PER_PACKET, 2.0**rank) for rank in range(WORLD)]


@pytest.mark.parametrize(
    ("world", "packets", "wanted", "owners"),
    [
        (8, 193, 256, 1),
        (8, 193, 0, 8),
        (8, 1000, 256, 3),
        (8, 2047, 256, 7),
        (8, 2048, 256, 8),
        (64, 193, 256, 8),
        (2, 10, 256, 1),
        (1, 0, 256, 1),
    ],
)
def test_how_many_own_a_part(world: int, packets: int, wanted: int, owners: int) -> None:
    assert owner_count(world, packets, wanted) == owners


def test_streams_are_as_long_as_is_wanted_or_eight_times_as_long() -> None:
    for world in range(1, 40):
        for packets in (0, 1, 100, 256, 5000, 20_000):
            owners = owner_count(world, packets, 256)
            assert 1 <= owners <= world
            assert world <= owners * LONGER_MOST
            assert packets // owners >= 256 or owners == max(1, -(-world // LONGER_MOST))
            assert owners == world or packets // (owners + 1) < 256


@pytest.mark.parametrize("topology", [None, HOSTS])
def test_without_loss_the_mean_is_exact_whoever_owns(topology: Topology | None) -> None:
    for many in range(1, WORLD + 1):
        for order in permutations(range(WORLD), many):
            plans = plans_of(order, topology)
            assert len({plan.signature for plan in plans}) == 1
            got = inputs()
            execute(plans, got, got, "f64", 1.0, partial(lost, Inject(), 0, 0), 0)
            for array in got:
                np.testing.assert_array_equal(array, 3.75)


def test_streams_grow_as_owners_become_fewer() -> None:
    for many, packets in ((4, 3), (2, 6), (1, 12)):
        lengths = {
            slot.length // PER_PACKET
            for plan in plans_of((2, 0, 3, 1)[:many])
            for slot in plan.slots
            if slot.sources
        }
        assert max(lengths) == packets


@pytest.mark.parametrize("many", [1, 2])
@pytest.mark.parametrize("topology", [None, HOSTS])
def test_the_mean_stays_unbiased_where_owners_are_drawn(
    many: int, topology: Topology | None
) -> None:
    """What owners have reduced, by hosts of 2, 1 and 1 ranks too: an owner's host is drawn by its
    ranks. With owners that stay the same it leans to them, so the test has power."""
    inject, errors = Inject(loss=0.4, burst=2.0, seed=11), {True: [], False: []}
    for op in range(150):
        for redrawn, found in errors.items():
            order = draw_order(11, 0, op, WORLD) if redrawn else (3, 2, 1, 0)
            plans, got = plans_of(order[:many], topology), inputs()
            execute(plans, got, got, "f64", 1.0, partial(lost, inject, 0, op), 0)
            reduced = [
                got[plan.rank][slot.offset : slot.offset + slot.length]
                for plan in plans
                for slot in plan.slots
                if slot.finish == Finish.MEAN
            ]
            found.append([np.concatenate(reduced).mean() - 3.75])
    assert abs(scores(np.array(errors[True]))).max() < 4
    assert abs(scores(np.array(errors[False]))).max() > 6


def test_a_ring_needs_all_ranks() -> None:
    with pytest.raises(ValueError, match=r"order is \(0, 1\), wanted each of 0 to 2 once"):
        ring.all_reduce(3, 0, 10, 5, order=(0, 1))
    for order in ((), (0, 0), (0, 3)):
        with pytest.raises(ValueError, match="wanted one or more of 0 to 2, each once"):
            hierarchical.all_reduce(3, 0, 10, 5, order=order)
