"""Plans of two levels: a slot feeds slots of its own rank, each level with its own packet size,
delivery, repair and parity. The engine's result is the reference's, to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lossycoll.errors import LossyError
from lossycoll.plan import Delivery, Finish, Level, Missing, Own, Plan
from lossycoll.plan.sets import Code
from tests.support import two_levels
from tests.support.network import Network
from tests.support.oracle_cases import PAYLOAD, WAYS, Case
from tests.support.oracle_checks import check
from tests.support.sampling import pairs
from tests.support.two_levels import Hosts, Topology

HOSTS: tuple[Hosts, ...] = (
    ((0, 1), (2,)),
    ((0, 1), (2, 3)),
    ((4, 1), (0,), (2, 3)),
    ((0, 1, 2), (3,), (4, 5)),
    ((0, 6, 2, 3), (4, 5, 1)),
    ((0, 1), (2, 3), (4, 5), (6, 7)),
)
RELIABLE, LOSSY = Delivery(reliable=True), Delivery()
LOSSES = (
    "",
    "loss=0.1,seed=6",
    "loss=0.5,seed=7",
    "loss=0.3,burst=4,seed=9",
    "loss=0.1,dup=0.05,reorder=0.1,seed=11",
)
HOW: tuple[tuple[Delivery, dict[str, object]], ...] = (
    (RELIABLE, {}),
    (RELIABLE, {"repair": 1, "code": Code(3, 1)}),
    (LOSSY, {}),
    (Delivery(code=Code(8, 3)), {"reliable": True}),
    (Delivery(repair=1), {"code": Code(16, 6)}),
)
"""Within hosts, and between them."""
WORLD = {sum(len(host) for host in hosts): hosts for hosts in HOSTS}


def cases(topology: Topology) -> list[Case]:
    return [Case(two_levels.algorithm(topology), way) for way in WAYS["all_reduce"]]


def counts(world: int, times: int) -> tuple[int, ...]:
    within = PAYLOAD // 4 // times * times
    return (0, 1, world + 1, within + 1, world * within + 3, 23 * within + 5)


@pytest.mark.parametrize(
    ("hosts", "loss"), list(pairs(HOSTS, LOSSES)), ids=lambda value: f"{value}".replace(" ", "")
)
def test_engine_equals_reference(hosts: Hosts, loss: str) -> None:
    world, dropped, turn = sum(len(host) for host in hosts), 0, LOSSES.index(loss)
    with Network(world, PAYLOAD, inject=loss, seed=11) as network:
        for within, between in HOW:
            for times in (1, 4):
                every = cases(Topology(hosts, within, times))
                for count in counts(world, times):
                    turn += 1
                    case = every[turn % len(every)]
                    dropped += check(network, case, count, "f32", loss, exact=True, **between)
        stats = [engine.stats() for engine in network.engines]
    assert sum(s.malformed + s.foreign + s.socket_overflow for s in stats) == 0
    if loss:
        assert dropped > 0, "the fault did not happen"
        assert sum(s.packets_recovered for s in stats) > 0
    else:
        assert sum(s.packets_missing for s in stats) == 0


@pytest.mark.parametrize(("dtype", "encoding"), [("f64", "same"), ("f16", "same"), ("bf16", "same"),
                                                 ("f32", "bf16"), ("f32", "fp16")])  # fmt: skip
@pytest.mark.parametrize("loss", ["", "loss=0.3,seed=5"])
def test_types_and_encodings(dtype: str, encoding: str, loss: str) -> None:
    for world in (3, 6):
        with Network(world, PAYLOAD, inject=loss) as network:
            for within, between in HOW:
                for case in cases(Topology(WORLD[world], within, 2)):
                    check(network, case, 700, dtype, loss, encoding=encoding, **between)


def test_nothing_is_lost_where_a_level_is_reliable() -> None:
    """Loss between hosts alone: each host's ranks end with the same, whatever came of the rest."""
    world, count = 5, 3000
    with Network(world, PAYLOAD, inject="loss=0.4,seed=2") as network:
        topology = Topology(WORLD[world], RELIABLE, 2)
        plans = [
            two_levels.all_reduce(topology, world, r, count, PAYLOAD // 4, missing=Missing.KEEP)
            for r in range(world)
        ]
        data = [np.full(count, 2.0**r, np.float32) for r in range(world)]
        zeros = [np.zeros(count, np.float32) for _ in range(world)]
        ended = network.run(plans, data, zeros, "f32")
    for host in topology.hosts:
        for rank in host[1:]:
            np.testing.assert_array_equal(zeros[rank], zeros[host[0]])
    assert all(one.code == 0 for one in ended)
    missing = [one.report.packets_missing for one in ended]
    assert sum(missing) > 0, "the fault did not happen"
    # What is there is the mean over whole hosts: nothing of a host is lost alone.
    sums = [sum(2.0**r for r in host) for host in topology.hosts]
    sizes = [len(host) for host in topology.hosts]
    means = {0.0}
    for bits in range(1, 1 << len(sums)):
        of = [i for i in range(len(sums)) if bits >> i & 1]
        factor = np.float32(1 / sum(sizes[i] for i in of))
        means.add(float(np.float32(sum(sums[i] for i in of)) * factor))
    found = {float(x) for array in zeros for x in np.unique(array)}
    assert found <= means
    assert len(found) > 3


def plan_of(rank: int, **changed: object) -> Plan:
    """Of a rank that hands on a partial sum, the slot that does it changed."""
    topology = Topology(((0, 1), (2, 3)), RELIABLE, 2)
    plan = two_levels.all_reduce(topology, 4, rank, 640, 64, order=(2, 3, 0, 1))
    at = next(i for i, slot in enumerate(plan.slots) if slot.own == Own.SLOT)
    slots = list(plan.slots)
    slots[at] = replace(slots[at], **changed)  # type: ignore[arg-type]
    return replace(plan, slots=tuple(slots))


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("a slot that there isn't", {"feed": 4000}),
        ("one that stands behind", {"feed": 4}),
        ("more than there is", {"own_offset": 32 * 64}),
        ("packets that are cut", {"own_offset": 1, "length": 32}),
        ("packets that don't fit into the feeder's", {"level": 3}),
        ("a level that there isn't", {"level": 4}),
        ("a copy that is stored", {"target": 1}),
        ("a source beside it", {"own": 3}),
    ],
)
def test_bad_feeds_are_refused(what: str, changed: dict[str, object]) -> None:
    x = np.zeros(640, np.float32)
    with Network(4, PAYLOAD) as network:
        plan = plan_of(0, **changed)
        plan = replace(plan, levels=(*plan.levels, Level(48)))
        with pytest.raises(LossyError, match="argument"):
            network.submit(0, plan, (x, x), "f32")
        good = plan_of(0)
        assert any(slot.finish == Finish.MEAN for slot in good.slots)
        network.submit(0, good, (x, x), "f32")
