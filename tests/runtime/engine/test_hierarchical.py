"""Plans by hosts and sites in the engine, with losses between hosts: its results are the
reference's. Here all packets go over UDP; a plan is the same whatever the link."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from lossycoll.errors import LossyError
from lossycoll.plan import (
    Algorithm,
    Finish,
    Plan,
    Topology,
    default_algorithm,
    faults,
    hierarchical,
)
from lossycoll.plan.sets import Code
from lossycoll.runtime.engine.packet_masks import Blocks
from tests.oracle import masks
from tests.oracle.codec import codec_of, wire_type
from tests.oracle.reference_executor import execute
from tests.support.network import GROUP, Network, elements
from tests.support.oracle_cases import PAYLOAD, Case, cases_of
from tests.support.oracle_checks import check
from tests.support.plan_checks import nothing
from tests.support.sampling import pairs, some

SHAPES = {
    "one host": Topology.of_labels("aaa", "xxx", 2),
    "hosts": Topology.of_labels("aabb", "xxxx", 4),
    "uneven hosts": Topology.of_labels("aaabb", "xxxxx"),
    "sites": Topology.of_labels("abcd", "xxyy"),
    "uneven sites": Topology.of_labels("abacdd", "xyxyyy", 2),
    "hosts and sites": Topology.of_labels("aabbccdd", "xxxxyyyy", 2),
}
LOSSES = ("", "loss=0.4,seed=7", "loss=0.2,burst=4,dup=0.05,reorder=0.1,seed=9")
HOW: tuple[dict[str, object], ...] = ({}, {"repair": 1, "code": Code(6, 3)}, {"reliable": True})
COLLECTIVES = (
    *("all_reduce", "reduce_scatter", "all_gather", "broadcast"),
    *("all_to_all", "all_to_all_uneven", "gather", "scatter"),
)


def by_tiers(collective: str, topology: Topology, group: int = 1) -> Algorithm:
    """The algorithm for this topology; packets within a host fit into a payload. ``group``: they
    hold a multiple of so many elements."""
    found = default_algorithm(collective)

    def build(world: int, rank: int, *sizes: Any, **options: Any) -> Plan:
        *counts, elements_per_packet = sizes
        each = elements_per_packet // topology.host_packets
        each = max(1, each - each % group)
        return found.build(world, rank, *counts, each, topology=topology, **options)

    return replace(found, build=build)


def cases(topology: Topology, group: int = 1) -> list[Case]:
    return [case for name in COLLECTIVES for case in cases_of(by_tiers(name, topology, group))]


@pytest.mark.parametrize(("shape", "loss"), list(pairs(SHAPES, LOSSES)))
def test_engine_equals_reference(shape: str, loss: str) -> None:
    topology, dropped, turn = SHAPES[shape], 0, LOSSES.index(loss)
    world = topology.world
    with Network(world, PAYLOAD, inject=loss, seed=11) as network:
        for case in cases(topology):
            for count in (1, PAYLOAD // 4 + 1, 23 * PAYLOAD // 4 + 5):
                turn += 1
                dtype = ("f32", "f64", "bf16", "f16")[turn % 4] if case.sums else "bytes"
                dropped += check(network, case, count, dtype, loss, **HOW[turn % len(HOW)])
        stats = [engine.stats() for engine in network.engines]
    assert sum(s.malformed + s.foreign + s.socket_overflow for s in stats) == 0
    assert (dropped > 0) == bool(loss), "the fault did not happen"


@pytest.mark.parametrize(
    "encoding",
    list(some(["bf16", "fp16", "int8", "int5", "int4+stochastic", "int2/32+spikes"], 2)),
)
def test_encodings(encoding: str) -> None:
    loss = "loss=0.3,seed=5"
    topology = SHAPES["uneven sites"]
    low = codec_of(encoding, "f32").low
    with Network(topology.world, 320, inject=loss) as network:
        for case in cases(topology, low.group if low else 1):
            if not (low and case.way.weighted):  # partial sums have too many bits to be weighted
                check(network, case, 900, "f32", loss, encoding=encoding)


@pytest.mark.parametrize("encoding", ["fp16", "int8", "int4/32:int8/32", "int2+stochastic"])
@pytest.mark.parametrize("shape", ["hosts", "uneven sites", "hosts and sites"])
def test_sums_within_a_host_travel_as_they_are(shape: str, encoding: str) -> None:
    """The ranks of a host cancel each other but for whole numbers from 0 to 3: all encodings carry
    those, and none carries the contributions."""
    topology = SHAPES[shape].with_sum_packets(2)
    world, count, loss = topology.world, 900, "loss=0.3,seed=5"
    rng = np.random.default_rng(3)
    large = rng.integers(-(2**20), 2**20, (world, count)).astype(np.float32)
    for ranks in topology.members_of_hosts:
        large[ranks[-1]] = np.arange(count) % 4 - large[list(ranks[:-1])].sum(axis=0)
    plans = [
        hierarchical.all_reduce(world, rank, count, 128, topology=topology) for rank in range(world)
    ]
    for inject in ("", loss):
        with Network(world, 2048, inject=inject) as network:
            outputs, want = ([row.copy() for row in large] for _ in range(2))
            name = (GROUP, network.op)
            lost = partial(masks.lost, faults.parse(loss), *name)
            ended = network.run(plans, outputs, outputs, "f32", 1.0, encoding=encoding)
            execute(
                *(plans, want, want, "f32", 1.0), lost if inject else nothing, 0,
                encoding=encoding, name=name,
            )  # fmt: skip
        for rank in range(world):
            assert ended[rank].code == 0
            np.testing.assert_array_equal(outputs[rank], want[rank])
            assert inject or np.abs(outputs[rank]).max() <= 3


def test_packets_of_several_sizes_that_would_cut_groups_are_refused() -> None:
    topology = SHAPES["uneven sites"]
    x = np.zeros(900, np.float32)
    with Network(topology.world) as network:
        for each, taken in ((128, True), (127, False)):
            build = hierarchical.all_reduce
            plan = build(topology.world, 0, x.size, each, topology=topology)
            if taken:
                assert network.submit(0, plan, (x, x), "f32", encoding="int8")
            else:
                with pytest.raises(LossyError, match="argument"):
                    network.submit(0, plan, (x, x), "f32", encoding="int8")


@pytest.mark.parametrize("encoding", ["same", "fp16"])
def test_partial_sums_beyond_float16(encoding: str) -> None:
    """A host's sum exceeds what float16 holds; its contributions and the mean don't."""
    topology = SHAPES["uneven sites"]
    world, count, finishes = topology.world, 700, (Finish.MEAN, Finish.STRATIFIED, Finish.WEIGHTED)
    dtype = "f16" if encoding == "same" else "f32"
    kind = wire_type(dtype).wire
    each = PAYLOAD // 2 // topology.host_packets
    largest = np.full(count * world, 65504.0).astype(kind)
    plans = [
        [hierarchical.all_reduce(world, r, count, each, topology=topology) for r in range(world)]
    ]
    scatter = by_tiers("reduce_scatter", topology).build
    plans += [
        [scatter(world, r, count, PAYLOAD // 2, finish=finish) for r in range(world)]
        for finish in finishes
    ]
    with Network(world, PAYLOAD) as network:
        for same in plans:
            inputs = [largest[: plan.in_elements].copy() for plan in same]
            outputs = [np.zeros(plan.out_elements, kind) for plan in same]
            want = [x.copy() for x in outputs]
            ended = network.run(same, inputs, outputs, dtype, 1.0, encoding=encoding, divisor=world)
            execute(same, inputs, want, dtype, 1.0, nothing, 0, encoding=encoding, divisor=world)
            for rank in range(world):
                assert ended[rank].code == 0
                np.testing.assert_array_equal(outputs[rank], want[rank])
                np.testing.assert_allclose(outputs[rank], 65504.0, rtol=1e-3)


@pytest.mark.parametrize("shape", ["one host", "hosts", "hosts and sites"])
def test_ranks_know_what_arrived_and_get_what_their_host_needs(shape: str) -> None:
    topology, loss, rng = SHAPES[shape], "loss=0.5,seed=13", np.random.default_rng(1)
    world, packets, missed, needs = topology.world, 20, 0, 0
    each = PAYLOAD // topology.host_packets
    count = packets * each - 3
    unit = topology.sites if topology.has_sites else topology.hosts
    with Network(world, PAYLOAD, inject=loss) as network:
        lost = partial(masks.lost, faults.parse(loss), GROUP, network.op)
        build = by_tiers("all_gather", topology).build
        plans = [build(world, rank, count, PAYLOAD) for rank in range(world)]
        of_unit = rng.random((world, world, packets)) < 0.3
        needed = [of_unit[unit[rank]] for rank in range(world)]
        blocks = [
            Blocks(plan, [count] * world, plan.elements_per_packet, need)
            for plan, need in zip(plans, needed, strict=True)
        ]
        inputs = [elements("bytes", count, rng) for _ in range(world)]
        outputs = [np.zeros(count * world, np.uint8) for _ in range(world)]
        want = [x.copy() for x in outputs]
        tickets = [
            network.submit(
                rank, plans[rank], (inputs[rank], outputs[rank]), "bytes",
                needed=blocks[rank].encoded(),
            )
            for rank in range(world)
        ]  # fmt: skip
        slot_owner = {
            (plan.rank, slot.number): slot.offset // count for plan in plans for slot in plan.slots
        }
        execute(
            plans, inputs, want, "bytes", 1.0, lost, 0,
            needed=lambda sender, receiver, slot, n: needed[receiver][slot_owner[receiver, slot]],
        )  # fmt: skip
        for rank in range(world):
            note = partial(blocks[rank].note, network.engines[rank])
            assert network.end(rank, tickets[rank], note=note).code == 0
            np.testing.assert_array_equal(outputs[rank], want[rank])
    for rank in range(world):
        for owner in range(world):
            arrived = blocks[rank].arrived[owner]
            sent = np.resize(inputs[owner], (packets, each))
            got = np.resize(outputs[rank][owner * count : (owner + 1) * count], (packets, each))
            assert ((got == sent).all(axis=1) | ~arrived)[:-1].all()
            if unit[rank] == unit[owner]:
                assert arrived.all()
                continue
            assert not (needed[rank][owner] & ~arrived).any()
            missed += int(np.count_nonzero(~arrived))
            needs += int(np.count_nonzero(needed[rank][owner]))
            np.testing.assert_array_equal(arrived, blocks[unit.index(unit[rank])].arrived[owner])
    assert (missed > 0 and needs > 0) == (max(unit) > 0)
