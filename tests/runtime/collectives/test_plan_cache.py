"""Which plans are kept, what they become once ranks are lost, and what their packets carry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lossycoll.options.fields import Options
from lossycoll.plan import (
    Topology,
    choose_algorithm,
    default_algorithm,
    draw_order,
    leave_out,
    register,
    rename,
    unregister,
)
from lossycoll.plan.registry import COLLECTIVES
from lossycoll.runtime.collectives import plan_cache
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.collectives.group_context import Members
from lossycoll.runtime.collectives.plan_cache import REPLANNED, kept, layout_of, sum_layout_of
from lossycoll.runtime.engine.binding import DType

EVERYONE, FEWER = Members(4, 2, (0, 1, 2, 3)), Members(4, 2, (0, 2, 3))
OPTIONS = {"broadcast": {"root": 3, "fanout": 2}, "gather": {"root": 3}, "scatter": {"root": 3}}


def arguments(collective: str) -> tuple[object, ...]:
    sizes = {"barrier": (), "all_to_all_uneven": ((8,) * 4, (8,) * 4)}
    return (*sizes.get(collective, (1000,)), 100)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_plans_are_kept_and_follow_the_members(collective: str) -> None:
    by, sizes = default_algorithm(collective), arguments(collective)
    options = OPTIONS.get(collective, {})
    of_all = kept(EVERYONE, by, *sizes, **options)
    assert of_all.plan.signature == by.build(4, 2, *sizes, **options).signature
    assert kept(EVERYONE, by, *sizes, **options) is of_all
    left = kept(FEWER, by, *sizes, **options).plan
    if collective in REPLANNED:
        place = {"root": 2} if "root" in options else {}  # rank 3 is the third that is left
        want = rename(by.build(3, 1, *sizes, **{**options, **place}), FEWER.ranks, 4)
    else:
        want = leave_out(by.build(4, 2, *sizes, **options), FEWER.ranks)
    assert left == want
    assert left != of_all.plan


def test_plans_of_a_few_orders_are_kept_and_those_of_many_are_not() -> None:
    """Each lossy sum draws one: 4 ranks have 24 of them, and 8 have 40,320."""
    by = default_algorithm("all_reduce")

    def plan(world: int, order: tuple[int, ...] | None) -> object:
        members = Members(world, 0, tuple(range(world)))
        # It looks at nothing of its endpoint.
        return Endpoint._plan(None, members, (by, None), 4000, 100, order=order)  # type: ignore[arg-type]

    for world, order in ((4, None), (4, (2, 0, 1, 3)), (8, None), (8, (5,))):
        assert plan(world, order) is plan(world, order)
    order = (7, 6, 5, 4, 3, 2, 1, 0)
    assert plan(8, order) is not plan(8, order)


def test_only_direct_plans_are_kept_when_ranks_are_lost() -> None:
    direct = default_algorithm("all_gather")
    relayed = register(replace(direct, name="relayed", default=False, direct=False))
    everyone, fewer = Members(4, 0, (0, 1, 2, 3)), Members(4, 0, (0, 2, 3))

    def chosen(collective: str, members: Members, name: str) -> object:
        return plan_cache.algorithm(collective, members, name, HOSTS)

    assert chosen("all_gather", everyone, "relayed") == (relayed, None)
    assert chosen("all_gather", fewer, "relayed") == (direct, None)
    # A plan by hosts passes on what others have; one of the same algorithm as if there were none
    # doesn't.
    assert chosen("all_gather", everyone, "hierarchical") == (direct, HOSTS)
    assert chosen("all_gather", fewer, "hierarchical") == (direct, None)
    exchange = default_algorithm("all_to_all")
    assert chosen("all_to_all", fewer, "hierarchical") == (exchange, HOSTS)
    # Collectives without a part for each rank are planned anew, for as many as are left.
    ring = choose_algorithm("all_reduce", "ring", 4)
    assert chosen("all_reduce", fewer, "ring") == (ring, None)
    transpose = default_algorithm("all_reduce")
    assert chosen("all_reduce", Members(4, 0, (0,)), "ring") == (transpose, None)
    assert chosen("all_reduce", fewer, "hierarchical") == (transpose, HOSTS)
    assert chosen("all_reduce", fewer, "transpose") == (transpose, None)
    unregister(relayed)


def test_the_order_is_drawn_for_lossy_calls_of_those_that_want_it() -> None:
    other = (replace(choose_algorithm("all_reduce", "ring", 4), name="other"), None)
    everyone, fewer = Members(6, 0, tuple(range(6))), Members(6, 0, (0, 2, 3))
    lossy, reliable = Options(seed=3), Options(seed=3, delivery="reliable")
    orders = {plan_cache.order(other, everyone, lossy, 1, op, 9) for op in range(5)}
    assert len(orders) == 5
    assert plan_cache.order(other, fewer, lossy, 1, (1 << 32) + 4, 9) == draw_order(3, 1, 4, 3)
    assert plan_cache.order(other, everyone, reliable, 1, 0, 9) is None
    fixed = (replace(other[0], draws_order=False), None)
    assert plan_cache.order(fixed, everyone, lossy, 1, 0, 9) is None


@pytest.mark.parametrize(
    ("elements", "per_packet", "how"),
    [
        (193 * 352, 128, {}),
        (400 * 352, 176, {}),
        (512 * 352, 352, {}),
        (193 * 352, 352, {"finer_packets": 1}),
        (193 * 352, 352, {"stream_packets": 0}),
        (193 * 352, 48, {"finer_packets": 8, "stream_packets": 1024}),
        (193 * 352, 352, {"repair": 1}),
        (193 * 352, 352, {"max_missing": "none"}),
        (193 * 352, 352, {"delivery": "reliable"}),
        (0, 352, {}),
    ],
)
def test_packets_of_short_streams_are_smaller_where_parity_alone_restores(
    elements: int, per_packet: int, how: dict[str, Any]
) -> None:
    """A reduce-scatter's chunk, and an all-reduce's part of each of its owners."""
    options = Options(**{"max_missing": 0.01, "repair": 0, **how})
    scatter, reduce = default_algorithm("reduce_scatter"), default_algorithm("all_reduce")
    assert plan_cache.finer(scatter, elements, 6, 352, options) == per_packet
    assert plan_cache.finer(scatter, (0, elements, elements), 6, 352, options) == per_packet
    assert plan_cache.finer(reduce, 6 * elements, 6, 352, options) == per_packet
    assert plan_cache.finer(reduce, elements, 1, 352, options) == per_packet
    ring = choose_algorithm("all_reduce", "ring", 4)
    assert plan_cache.finer(ring, elements, 1, 352, options) == 352


@pytest.mark.parametrize(
    ("packets", "owners", "how"),
    [
        (700, 2, {}),
        (9, 1, {}),
        (5000, 6, {}),
        (700, 6, {"stream_packets": 0}),
        (700, 3, {"stream_packets": 200}),
        (700, 6, {"repair": 1}),
        (700, 6, {"max_missing": "none"}),
    ],
)
def test_short_buffers_have_few_owners_where_parity_alone_restores(
    packets: int, owners: int, how: dict[str, Any]
) -> None:
    """The rule is of what all ranks know; what is measured isn't."""
    transpose = (default_algorithm("all_reduce"), None)
    members = Members(6, 0, tuple(range(6)))
    options = Options(**{"max_missing": 0.01, "repair": 0, "seed": 3, **how})
    order = plan_cache.order(transpose, members, options, 1, 4, packets)
    assert order == draw_order(3, 1, 4, 6)[:owners]
    chooses = Options(max_missing=0.01, seed=3)  # rounds of resending as well
    for choice, asked in (
        ((choose_algorithm("all_reduce", "ring", 4), None), options),
        ((transpose[0], Topology.of_labels("aabbcc", "x" * 6)), options),
        (transpose, chooses),
    ):
        order = plan_cache.order(choice, members, asked, 1, 4, packets)
        assert order == draw_order(3, 1, 4, 6)


HOSTS, ONE_HOST = Topology.of_labels("aabb", "xxxx", 2), Topology.of_labels("aaaa", "xxxx")


@pytest.mark.parametrize(
    ("options", "topology", "name"),
    [
        ({}, Topology.flat(4), "auto"),
        ({}, HOSTS, "hierarchical"),
        ({"algorithm": "transpose"}, HOSTS, "transpose"),
        ({"algorithm": "hierarchical"}, Topology.flat(4), "hierarchical"),
        ({"estimator": "inverse_probability"}, HOSTS, "auto"),
        ({"estimator": "inverse_probability"}, ONE_HOST, "hierarchical"),
        ({"estimator": "inverse_probability", "delivery": "reliable"}, HOSTS, "hierarchical"),
    ],
)
def test_auto_goes_by_hosts_where_ranks_share_them(
    options: dict[str, str], topology: Topology, name: str
) -> None:
    assert plan_cache.name_of(Options(**options), topology) == name  # type: ignore[arg-type]


def test_nothing_is_drawn_where_nothing_is_lost() -> None:
    by = default_algorithm("all_reduce")
    for topology, drawn in ((None, True), (HOSTS, True), (ONE_HOST, False)):
        order = plan_cache.order((by, topology), EVERYONE, Options(), 1, 0, 9)
        assert (order is not None) == drawn


def test_survivors_are_planned_for_with_the_hosts_that_are_left() -> None:
    reduce = default_algorithm("all_reduce")
    plan = kept(FEWER, reduce, 1000, 100, topology=HOSTS).plan
    left = Topology.of_labels("abb", "xxx", 2)
    assert plan == rename(reduce.build(3, 1, 1000, 100, topology=left), FEWER.ranks, 4)
    copy = default_algorithm("broadcast")
    plan = kept(FEWER, copy, 1000, 100, root=3, fanout=4, topology=HOSTS).plan
    want = copy.build(3, 1, 1000, 100, root=2, fanout=4, topology=left)
    assert plan == rename(want, FEWER.ranks, 4)
    senders = {source for slot in plan.slots for source in slot.sources}
    assert senders == {3}, "only the root may send where ranks may be lost"


PAYLOAD = 1408
SHARED = 65024
"""LC_SHARED_PAYLOAD"""


@pytest.mark.parametrize("encoding", ["bf16", "int8", "int4/32", "int2", "int4:int8"])
@pytest.mark.parametrize("payload", [PAYLOAD, 8896, SHARED])
def test_sums_fit_into_the_packets_of_a_host(payload: int, encoding: str) -> None:
    topology = Topology.of_labels("aabb", "xxxx", SHARED // payload)
    layout = layout_of(payload, DType.F32, encoding)
    per_packet, found = sum_layout_of(layout, payload, encoding, topology)
    sums = found.sum_packets
    assert 0 < per_packet <= layout.per_packet
    assert per_packet == layout.per_packet or per_packet % 128 == 0
    assert 0 < 4 * per_packet * sums <= SHARED
    assert 4 * per_packet * (sums + 1) > payload * topology.host_packets
    assert found.of_members(range(4)) == found


def test_layouts_stay_where_there_is_nothing_to_tell_apart() -> None:
    shared, flat = Topology.of_labels("aabb", "xxxx", 4), Topology.flat(4)
    for encoding, topology in (("same", shared), ("int8", flat)):
        layout = layout_of(PAYLOAD, DType.F32, encoding)
        assert sum_layout_of(layout, PAYLOAD, encoding, topology) == (layout.per_packet, topology)
    tiny = Topology.of_labels("aab", "xxx", 1)
    layout = layout_of(64, DType.F32, "int2")
    assert sum_layout_of(layout, 64, "int2", tiny) == (layout.per_packet, tiny)
