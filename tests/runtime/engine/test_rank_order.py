"""Sums in the order of ranks: whatever comes first, the bits are the reference executor's, which
adds one rank after another. Its elements are such that another order gives another sum."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from lossycoll.plan import faults
from lossycoll.plan.sets import Code
from tests.oracle import masks
from tests.oracle.codec import codec_of
from tests.oracle.reference_executor import execute
from tests.runtime.engine.test_hierarchical import SHAPES, by_tiers
from tests.support.fake_rdma import VerbsNetwork
from tests.support.network import GROUP, Network
from tests.support.oracle_cases import CASES, PAYLOAD, Case, cases_of
from tests.support.oracle_checks import check, rough_elements
from tests.support.shared_ranks import SharedNetwork

SHUFFLED = "loss=0.2,dup=0.05,reorder=0.3,seed=11"
LOSSES = ("", SHUFFLED, "loss=0.3,burst=4,seed=8")
HOW: tuple[dict[str, Any], ...] = ({}, {"repair": 1, "code": Code(6, 3)}, {"reliable": True})
DTYPES = ("f32", "f64", "bf16", "f16")
COUNTS = (1, PAYLOAD // 4 + 1, 23 * PAYLOAD // 4 + 5)
REDUCTIONS = ("all_reduce", "reduce_scatter")
SUMS = [case for case in CASES if case.sums and not case.barrier]


def run(network: Network, cases: list[Case], loss: str, **how: Any) -> int:
    """Every case in several sizes, types and deliveries, the last rank first. Returns the packets
    that were lost."""
    network.submitting = range(network.world)[::-1]
    dropped, turn = 0, LOSSES.index(loss) if loss in LOSSES else 0
    for case in cases:
        if not case.algorithm.serves(network.world):
            continue
        for count in COUNTS:
            turn += 1
            dtype = "f32" if "encoding" in how else DTYPES[turn % len(DTYPES)]
            ways = {**HOW[turn % len(HOW)], **how}
            dropped += check(network, case, count, dtype, loss, deterministic=True, **ways)
    return dropped


def kept(network: Network) -> int:
    """How many packets had to wait: came before those of lower ranks."""
    return sum(engine.stats().order_kept for engine in network.engines)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_sums_are_in_rank_order(world: int, loss: str) -> None:
    with Network(world, PAYLOAD, inject=loss, seed=11) as network:
        assert (run(network, SUMS, loss) > 0) == bool(loss), "the fault did not happen"
        # Of two addends either may come first.
        assert (kept(network) > 0) == (world > 2), "nothing came out of order"


@pytest.mark.parametrize("link", ["shared memory", "RDMA"])
def test_other_links(link: str) -> None:
    made = SharedNetwork(3, inject=SHUFFLED) if link == "shared memory" else None
    with made or VerbsNetwork(3, PAYLOAD, inject=SHUFFLED) as network:
        dropped, each = 0, network.payload_bytes // 4
        for case in SUMS:
            for how in HOW:
                count = 5 * each + 3
                dropped += check(network, case, count, "f32", SHUFFLED, deterministic=True, **how)
        assert dropped > 0 < kept(network)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", SHAPES)
def test_partial_sums_are_too(shape: str, loss: str) -> None:
    topology = SHAPES[shape]
    cases = [case for name in REDUCTIONS for case in cases_of(by_tiers(name, topology))]
    with Network(topology.world, PAYLOAD, inject=loss, seed=11) as network:
        assert (run(network, cases, loss) > 0) == bool(loss), "the fault did not happen"
        assert kept(network) > 0 or shape == "one host", "nothing came out of order"


@pytest.mark.parametrize("encoding", ["bf16", "fp16", "int8", "int4/32+spikes", "int2+stochastic"])
def test_encodings(encoding: str) -> None:
    low = codec_of(encoding, "f32").low
    topology, group = SHAPES["uneven sites"], low.group if low else 1
    cases = [case for name in REDUCTIONS for case in cases_of(by_tiers(name, topology, group))]
    with Network(topology.world, 320, inject=SHUFFLED) as network:
        for some in (SUMS, cases):
            assert run(network, some, SHUFFLED, encoding=encoding) > 0
        assert kept(network) > 0


def sums(network: Network, loss: str, count: int, **how: Any) -> tuple[list[Any], list[Any], Any]:
    """(bits, their reference's, reports) of one all-reduce."""
    case = next(case for case in SUMS if case.algorithm.name == "transpose")
    case = replace(case, way=replace(case.way, label=""))
    plans = case.plans(network.world, count, PAYLOAD // 4, 5)
    rng = np.random.default_rng(1)
    rows = [rough_elements("f32", count, rng) for _ in range(network.world)]
    want = [row.copy() for row in rows]
    lost = partial(masks.lost, faults.parse(loss), GROUP, network.op)
    network.submitting = range(network.world)[::-1]
    ended = network.run(plans, rows, rows, "f32", 1.0, **how)
    execute(plans, want, want, "f32", 1.0, lost, 0, deterministic=True)
    return rows, want, [one.report for one in ended]


@pytest.mark.parametrize("loss", ["", "loss=0.1,seed=3"])
@pytest.mark.parametrize("world", [4, 8])
def test_without_the_option_bits_differ(world: int, loss: str) -> None:
    """So what comes first isn't the order of ranks by chance. Nobody then keeps anything."""
    with Network(world, PAYLOAD, inject=loss) as network:
        for deterministic in (True, False):
            got, want, reports = sums(network, loss, 30_000, deterministic=deterministic)
            same = [np.array_equal(*pair) for pair in zip(got, want, strict=True)]
            assert all(same) if deterministic else not any(same)
            assert (sum(report.order_kept for report in reports) > 0) == deterministic


def test_what_waits_takes_no_more_than_what_comes() -> None:
    """Each rank owns a quarter, to which three others contribute: at most two of them may wait."""
    count = 400_000
    with Network(4, PAYLOAD) as network:
        reports = sums(network, "", count, deterministic=True)[2]
        took, most = [report.order_bytes for report in reports], 2 * count
        head = (PAYLOAD + 128) / PAYLOAD
        assert PAYLOAD <= max(took) <= most * head


def test_the_owner_makes_no_difference() -> None:
    """Nor does the number of the operation: in rank order there is one sum of some elements."""
    with Network(4, PAYLOAD) as network:
        case = next(case for case in SUMS if case.algorithm.name == "transpose")
        rng, found = np.random.default_rng(2), []
        rows = [rough_elements("f32", 5000, rng) for _ in range(4)]
        for op in range(4):
            plans = case.plans(4, 5000, PAYLOAD // 4, op)
            buffers = [row.copy() for row in rows]
            network.run(plans, buffers, buffers, "f32", 4.0, deterministic=True)
            found.append(buffers)
        owners = {case.plans(4, 5000, PAYLOAD // 4, op)[0].signature for op in range(4)}
        assert len(owners) > 1
        wanted = ((rows[0] + rows[1]) + rows[2]) + rows[3]
        for buffers in found:
            for buffer in buffers:
                np.testing.assert_array_equal(buffer, wanted)
