"""Plans by hosts and sites: what leaves a host, what a mean is worth, who passes on what."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lossycoll.plan import (
    Finish,
    Missing,
    Plan,
    Slot,
    Topology,
    copies,
    default_algorithm,
    draw_order,
    hierarchical,
    reduce_scatter,
)
from tests.oracle.reference_executor import Lost, RankResult, execute
from tests.support.plan_checks import nothing

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
SHAPES = [
    ("ab", "xx"),
    ("aab", "xxx"),
    ("aabb", "xxxx"),
    ("abab", "xxxx"),
    ("abcd", "xxyy"),
    ("aaabb", "xxxxx"),
    ("aabbccdd", "xxxxyyyy"),
    ("aabbbcd", "xxxxxyy"),
]


def plans_of(collective: str, topology: Topology, count: int, per_packet: int) -> list[Plan]:
    build = default_algorithm(collective).build
    world = topology.world
    return [build(world, rank, count, per_packet, topology=topology) for rank in range(world)]


def leaving(plans: Sequence[Plan], unit: tuple[int, ...]) -> NDArray[np.int64]:
    """Elements that leave each unit; ``unit``: the number of each rank's."""
    found = np.zeros(max(unit) + 1, np.int64)
    for plan in plans:
        for slot in plan.slots:
            away = sum(unit[dest.peer] != unit[plan.rank] for dest in slot.dests)
            found[unit[plan.rank]] += away * slot.length
    return found


@pytest.mark.parametrize(("hosts", "sites"), SHAPES)
def test_what_leaves_a_host_or_a_site_is_the_least_that_must(hosts: str, sites: str) -> None:
    topology = Topology.of_labels(hosts, sites, 3)
    count = 40 * topology.world
    sum_of_all = {"all_reduce": 2 * count, "broadcast": count}
    for collective in COLLECTIVES:
        plans = plans_of(collective, topology, count, 7)
        whole = sum_of_all.get(collective, count * topology.world)
        for unit in (topology.hosts, topology.sites):
            units = max(unit) + 1
            left = leaving(plans, unit)
            assert left.sum() == whole * (units - 1), collective
            if collective == "all_reduce" and unit is topology.sites:
                most = 1.1 * 2 * count * (units - 1) / units
                assert left.max() <= most


@pytest.mark.parametrize("hosts", ["aabb", "aabbcc", "aaabbbcccddd", "abcabc"])
def test_hosts_of_one_size_send_as_much_and_their_ranks_share_it(hosts: str) -> None:
    topology = Topology.of_labels(hosts, "x" * len(hosts), 3)
    count, n = 420 * topology.world, topology.n_hosts
    for order in (None, draw_order(1, 2, 3, topology.world)):
        plans = [
            hierarchical.all_reduce(topology.world, r, count, 7, order=order, topology=topology)
            for r in range(topology.world)
        ]
        left = leaving(plans, topology.hosts)
        assert left.max() <= 1.1 * 2 * count * (n - 1) / n
        ranks = [
            sum(
                slot.length
                for slot in plan.slots
                for dest in slot.dests
                if topology.hosts[dest.peer] != topology.hosts[plan.rank]
            )
            for plan in plans
        ]
        assert max(ranks) <= 1.1 * min(ranks)


@pytest.mark.parametrize("sizes", [(1, 2, 3), (2, 2, 1), (4, 2, 2), (4, 2, 1, 1), (3, 1)])
@pytest.mark.parametrize("of_sites", [False, True])
def test_what_hosts_of_several_sizes_send(sizes: tuple[int, ...], of_sites: bool) -> None:
    """As much as each other where no order is drawn. Where one is, the owner's host, or site, is
    drawn by its ranks, and sends the mean to all others. docs/topology.md has the figures."""
    unit = np.repeat(np.arange(len(sizes)), sizes)
    # Sites of hosts of two ranks, and a last one of one.
    hosts = [(u, i // 2) for u, size in enumerate(sizes) for i in range(size)]
    topology = Topology.of_labels(hosts if of_sites else list(unit), list(unit * of_sites), 3)
    world, n, count = topology.world, len(sizes), 420 * 7 * sum(sizes)
    share = np.array(sizes) / world

    def sent(order: tuple[int, ...] | None) -> NDArray[np.float64]:
        plans = [
            hierarchical.all_reduce(world, r, count, 7, order=order, topology=topology)
            for r in range(world)
        ]
        return leaving(plans, tuple(unit)) / (2 * count * (n - 1) / n)

    np.testing.assert_allclose(sent(None), 1, rtol=0.01)
    drawn = np.mean([sent(draw_order(1, 2, op, world)) for op in range(5)], axis=0)
    np.testing.assert_allclose(drawn, n / (2 * (n - 1)) * (1 + share * (n - 2)), rtol=0.01)


def test_one_host_needs_the_network_for_nothing() -> None:
    topology = Topology.of_labels("aaaa", "xxxx", 8)
    for collective in COLLECTIVES:
        plans = plans_of(collective, topology, 5000, 64)
        slots = [slot for plan in plans for slot in plan.slots if slot.dests or slot.sources]
        assert {slot.level for slot in slots} == {1}
        assert {level.elements_per_packet for plan in plans for level in plan.levels} == {512}


@pytest.mark.parametrize("hosts", ["a", "ab", "abcd"])
def test_a_topology_that_says_nothing_is_none(hosts: str) -> None:
    """Hosts of one rank, at sites of one host: whatever they are called, plans are those without,
    which ranks that know nothing of hosts have as well."""
    topology, world = Topology.of_labels(hosts, hosts, 4), len(hosts)
    for collective in COLLECTIVES:
        for rank in range(world):
            build = default_algorithm(collective).build
            flat = build(world, rank, 300, 7)
            mine = build(world, rank, 300, 7, topology=topology)
            assert (mine.slots, mine.levels) == (flat.slots, flat.levels)
        assert {slot.level for slot in flat.slots} <= {0}


def random_topology(rng: np.random.Generator) -> Topology:
    world = int(rng.integers(1, 10))
    site_of = rng.integers(0, 3, 6)
    hosts = [int(host) for host in rng.integers(0, rng.integers(1, 7), world)]
    return Topology.of_labels(hosts, [int(site_of[h]) for h in hosts], int(rng.integers(1, 4)))


def run(
    plans: list[Plan], inputs: list[Any], in_place: bool, lost: Lost = nothing
) -> tuple[list[RankResult], list[Any]]:
    outputs = inputs if in_place else [np.full(p.out_elements, np.nan) for p in plans]
    return execute(plans, inputs, outputs, "f64", 1.0, lost, 0), outputs


@pytest.mark.parametrize("seed", range(25))
def test_any_topology_gives_what_numpy_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    topology = random_topology(rng)
    world, count, root = topology.world, int(rng.integers(1, 200)), int(rng.integers(0, 9))
    order = draw_order(seed, 1, 2, world) if seed % 2 else None
    how: dict[str, dict[str, Any]] = {
        "all_reduce": {"order": order},
        "reduce_scatter": {},
        "all_gather": {},
        "broadcast": {"root": root % world, "fanout": int(rng.integers(1, world + 2))},
    }
    for collective, options in how.items():
        build = default_algorithm(collective).build
        plans = [build(world, r, count, 7, topology=topology, **options) for r in range(world)]
        inputs = [rng.integers(-8, 9, plan.in_elements).astype(np.float64) for plan in plans]
        want = {
            "all_reduce": [np.mean(inputs, axis=0)] * world,
            "reduce_scatter": np.split(np.mean(inputs, axis=0), world)
            if collective == "reduce_scatter"
            else [],
            "all_gather": [np.concatenate(inputs)] * world,
            "broadcast": [inputs[root % world].copy()] * world,
        }[collective]
        found, outputs = run(plans, inputs, collective in ("all_reduce", "broadcast"))
        for rank in range(world):
            np.testing.assert_allclose(outputs[rank], want[rank], atol=1e-12)
            assert found[rank].packets_missing == 0
            weights = {int(n) for packets in found[rank].counts.values() for n in packets}
            assert weights <= {world}, "a mean has the weight of all"


def chosen(arrives: dict[tuple[int, int], bool]) -> Lost:
    """Loses what goes over some links; the others must not be asked for."""

    def lost(sender: int, receiver: int, _slot: int, n: int, _round: int) -> NDArray[np.bool_]:
        return np.full(n, not arrives[sender, receiver])

    return lost


def outcomes(links: Sequence[tuple[int, int]], loss: float) -> Any:
    """(what arrives, its chance), for all combinations."""
    for bits in product((False, True), repeat=len(links)):
        came = sum(bits)
        yield dict(zip(links, bits, strict=True)), (1 - loss) ** came * loss ** (len(bits) - came)


def one_packet(build: Callable[[int], Plan], world: int) -> tuple[list[Plan], list[Any]]:
    """Plans, and inputs by which each element of a mean is a rank's share in it."""
    return [build(rank) for rank in range(world)], [np.eye(world)[rank] for rank in range(world)]


def means_of(
    topology: Topology, missing: Missing
) -> Iterator[tuple[list[Plan], list[Any], int, Slot]]:
    """For each order: plans and inputs of one packet, and the owner of its mean with its slot."""
    world = topology.world
    for order in permutations(range(world)):
        plans, inputs = one_packet(
            lambda rank, order=order: hierarchical.all_reduce(
                world, rank, world, world, order=order, missing=missing, topology=topology
            ),
            world,
        )
        ((owner, slot),) = [(p.rank, s) for p in plans for s in p.slots if s.finish == Finish.MEAN]
        yield plans, inputs, owner, slot


UNEQUAL = [("aab", "xxx"), ("aaabb", "xxxxx"), ("aabc", "xxxx"), ("aabcc", "xxxyy")]


@pytest.mark.parametrize(("hosts", "sites"), UNEQUAL)
@pytest.mark.parametrize("loss", [0.1, 0.6])
def test_each_rank_has_its_share_of_a_mean(hosts: str, sites: str, loss: float) -> None:
    """Over all orders and all outcomes, what the owner of a packet forms is exactly the mean."""
    topology = Topology.of_labels(hosts, sites, 2)
    world, share, alone, seen = topology.world, 0.0, 0, 0
    orders = math.factorial(world)
    for plans, inputs, owner, slot in means_of(topology, Missing.KEEP):
        back = {(owner, dest.peer): True for dest in slot.dests}
        for arrives, chance in outcomes([(sender, owner) for sender in slot.sources], loss):
            _, outputs = run(plans, [x.copy() for x in inputs], True, chosen({**arrives, **back}))
            share = share + chance * outputs[owner]
            alone += not all(arrives.values())
            seen += 1
    np.testing.assert_allclose(share / orders, 1 / world, rtol=1e-9)
    assert 0 < alone < seen, "some sums were lost, not all"


@pytest.mark.parametrize("hosts", ["aab", "aaab", "aabb"])
def test_ranks_of_large_hosts_miss_fewer_means(hosts: str) -> None:
    """What ranks end with leans, on average over them, to those that miss more: theory.md."""
    topology = Topology.of_labels(hosts, "x" * len(hosts), 2)
    world, loss, share = topology.world, 0.3, 0.0
    orders = math.factorial(world)
    for plans, inputs, owner, slot in means_of(topology, Missing.OWN):
        up = {(sender, owner): True for sender in slot.sources}
        for arrives, chance in outcomes([(owner, dest.peer) for dest in slot.dests], loss):
            _, outputs = run(plans, [x.copy() for x in inputs], True, chosen({**up, **arrives}))
            share = share + chance * np.mean(outputs, axis=0)
    missed = np.array([loss * (1 - hosts.count(host) / world) for host in hosts])
    np.testing.assert_allclose(share / orders, (1 + missed - missed.mean()) / world, rtol=1e-9)


@pytest.mark.parametrize(("hosts", "sites"), UNEQUAL)
def test_a_stratum_of_a_host_is_unbiased(hosts: str, sites: str) -> None:
    """Each rank's share of an owner's chunk, on average over all outcomes in which another host's
    (or site's) sum arrives; what is alone is the mean of the owner's."""
    topology = Topology.of_labels(hosts, sites, 2)
    world, loss = topology.world, 0.3
    build = default_algorithm("reduce_scatter").build
    for owner in range(world):
        counts = [world if rank == owner else 0 for rank in range(world)]
        plans, inputs = one_packet(
            lambda rank, counts=counts: build(world, rank, counts, world, topology=topology), world
        )
        ((slot,),) = [[s for s in p.slots if s.finish] for p in plans if p.rank == owner]
        share, chances = np.zeros(world), 0.0
        for arrives, chance in outcomes([(sender, owner) for sender in slot.sources], loss):
            found, outputs = run(plans, inputs, False, chosen(arrives))
            if any(arrives.values()):
                share, chances = share + chance * outputs[owner], chances + chance
                assert found[owner].alone == 0
                continue
            unit = topology.sites if topology.has_sites else topology.hosts
            mine = np.array([unit[rank] == unit[owner] for rank in range(world)])
            np.testing.assert_allclose(outputs[owner], mine / mine.sum())
            assert found[owner].alone == 1
        np.testing.assert_allclose(share / chances, 1 / world, rtol=1e-9)


def lossy(seed: int, p: float) -> Lost:
    rng = np.random.default_rng(seed)
    return lambda _s, _r, _slot, n, _round: rng.random(n) < p


@pytest.mark.parametrize(("hosts", "sites"), [("aaabb", "xxxxx"), ("aabbccdd", "xxxxyyyy")])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast"])
def test_the_ranks_of_a_host_miss_the_same(hosts: str, sites: str, collective: str) -> None:
    topology = Topology.of_labels(hosts, sites, 2)
    build = default_algorithm(collective).build
    world, count = topology.world, 300
    more = {"missing": Missing.ZERO} if collective == "all_reduce" else {}
    plans = [build(world, r, count, 4, topology=topology, **more) for r in range(world)]
    rng = np.random.default_rng(3)
    inputs = [rng.random(plan.in_elements) + 1 for plan in plans]
    outputs = (
        inputs
        if plans[0].in_elements == plans[0].out_elements
        else [np.zeros(plan.out_elements) for plan in plans]
    )
    if collective == "broadcast":
        for array in outputs[1:]:
            array[:] = 0
    found = execute(plans, inputs, outputs, "f64", 1.0, lossy(5, 0.3), 0)
    unit = topology.sites if topology.has_sites else topology.hosts
    missed = [array == 0 for array in outputs]
    for rank in range(world):
        np.testing.assert_array_equal(missed[rank], missed[unit.index(unit[rank])])
    assert 0 < sum(int(gone.sum()) for gone in missed) < sum(len(gone) for gone in missed)
    assert sum(one.kept + one.zero_filled for one in found) > 0


def test_what_does_not_fit_is_refused() -> None:
    topology = Topology.of_labels("aab", "xxx")
    for collective in COLLECTIVES:
        build = default_algorithm(collective).build
        with pytest.raises(ValueError, match="the topology has 3 ranks, wanted 4"):
            build(4, 0, 100, 7, topology=topology)
    with pytest.raises(ValueError, match=r"order is .*, wanted one or more of 0 to 2, each once"):
        hierarchical.all_reduce(3, 0, 100, 7, order=(0, 1, 1), topology=topology)
    ranks = range(22_000)
    many = Topology.of_labels([rank // 2 for rank in ranks], [rank // 4 for rank in ranks])
    with pytest.raises(ValueError, match="the plan needs 66000 slots, wanted 65534 at most"):
        copies.all_gather(22_000, 0, 1, 7, topology=many)


@pytest.mark.parametrize(("hosts", "sites"), [("aaabb", "xxxxx"), ("aabbccdd", "xxxxyyyy")])
def test_what_is_lost_in_place_is_left_with_who_sent_it(hosts: str, sites: str) -> None:
    """What owners got, and what is left of lost blocks, is all that the ranks gave."""
    topology, per_packet = Topology.of_labels(hosts, sites, 2), 4
    world, count = topology.world, 10 * per_packet
    how = {"finish": Finish.WEIGHTED, "topology": topology}
    plans = [
        reduce_scatter.IN_PLACE.build(world, rank, count, per_packet, **how)
        for rank in range(world)
    ]
    rng = np.random.default_rng(4)
    data = [rng.integers(-8, 9, world * count).astype(np.float64) for _ in range(world)]
    whole = np.sum(data, axis=0)
    found = execute(plans, data, data, "f64", float(world), lossy(6, 0.3), 0)
    got = np.concatenate([data[rank][rank * count :][:count] for rank in range(world)])
    left = np.zeros_like(whole)
    lost = 0
    for plan in plans:
        for slot in plan.slots:
            for dest in slot.dests if slot.level == 0 else ():
                for packet in found[dest.peer].missing[dest.slot, plan.rank]:
                    at = dest.peer * count + packet * per_packet
                    left[at : at + per_packet] += data[plan.rank][at : at + per_packet]
                    lost += 1
    assert lost > 0, "the fault did not happen"
    np.testing.assert_allclose(got + left, whole)


def test_orders_that_mean_the_same_turns_share_their_slots() -> None:
    """Of 1 and 7 ranks, which turn is the single rank's: a plan is drawn for each lossy call."""
    topology = Topology.of_labels("abbbbbbb", "xxxxxxxx", 4)
    made: dict[int, list[Plan]] = {}
    for op in range(60):
        order = draw_order(1, 2, op, 8)
        plan = hierarchical.all_reduce(8, 1, 90_000, 64, order=order, topology=topology)
        made.setdefault(order.index(0), []).append(plan)
    assert len(made) == 8
    for plans in made.values():
        assert all(a is b for p in plans for a, b in zip(p.slots, plans[0].slots, strict=True))
    assert len({plan.signature for plans in made.values() for plan in plans}) == 60
    assert len({plans[0].slots for plans in made.values()}) == 8
