"""The backbone: the engine's result over real sockets equals the reference executor's.

Injected loss is a pure function of (seed, group, operation, slot, sender, receiver, round, packet),
so both are given the same losses and must agree on every element, for every plan, at every loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from lossycoll.plan import copies, faults, owners
from lossycoll.runtime.engine.packet_masks import Blocks
from lossycoll.runtime.engine.reports import Cause
from tests.oracle import masks
from tests.oracle.codec import wire_type
from tests.oracle.reference_executor import execute
from tests.support.network import GROUP, Network
from tests.support.oracle_cases import CASES, PAYLOAD, Case, lossy_cases, sizes
from tests.support.oracle_checks import check
from tests.support.oracle_packets import check_needed, check_reported_loss

BURSTS = "loss=0.1,burst=8,seed=9"
LOSSES = (
    "",
    "loss=0.01,seed=5",
    "loss=0.1,seed=6",
    "loss=0.5,seed=7",
    "loss=0.01,burst=4,seed=8",
    BURSTS,
    "loss=0.5,burst=3,seed=10",
    "loss=0.1,dup=0.05,reorder=0.1,seed=11",
)
UNEVEN = "loss=0.2,burst=3,link=0-1:0.6,link=1-0:0,link=2-1:1,seed=12"
DTYPES = ("f32", "f64", "f16", "bf16", "bytes")
WORLDS = range(1, 9)
OFTEN = (1, 2, 3, 5, 8)
"""The worlds of the short suite: alone, one peer, odd and even counts, and the most. Three ranks
meet all losses there, the most one, and others some."""
FEW = ("", BURSTS, LOSSES[-1])
REPAIRS = (0, 1)


def meetings(world: int, loss: str) -> Iterator[tuple[Case, int, int, str]]:
    """(case, repair, size by number, type).

    One type at a time; which one moves on with the world and with the loss. So every case meets
    every type in every size, with and without repair: at each loss over the worlds, and in each
    world over the losses.
    """
    start = world + (LOSSES.index(loss) if loss in LOSSES else 0)
    for at, case in enumerate(lossy_cases(world)):
        allowed = [d for d in DTYPES if not (case.sums and d == "bytes")]
        for repair in REPAIRS:
            for size in range(len(sizes(world, 1))):
                turn = start + at + repair + size
                yield case, repair, size, allowed[turn % len(allowed)]


def meeting(world: int, loss: str) -> Any:
    often = world == 3 or (world in OFTEN and loss in (FEW if world < 8 else (BURSTS,)))
    return pytest.param(world, loss, marks=() if often else pytest.mark.long)


@pytest.mark.parametrize(
    ("world", "loss"),
    [meeting(*at) for at in (*product(WORLDS, LOSSES), *product((2, 3, 5), [UNEVEN]))],
)
def test_engine_equals_reference(world: int, loss: str) -> None:
    dropped = 0
    with Network(world, PAYLOAD, inject=loss, seed=11) as network:
        for case, repair, size, dtype in meetings(world, loss):
            # Borders of packets lie elsewhere in every type.
            count = sizes(world, PAYLOAD // wire_type(dtype).wire.itemsize)[size]
            dropped += check(network, case, count, dtype, loss, repair=repair)
        for stats in (engine.stats() for engine in network.engines):
            assert stats.malformed == stats.foreign == stats.socket_overflow == 0
            if not loss:
                assert stats.packets_missing == 0
    if loss and world > 1:
        assert dropped > 0, "the fault did not happen"


def test_everything_meets() -> None:
    """Of worlds without peers nothing can be said about loss: they don't count."""
    types = sum(len(DTYPES) - case.sums for case in lossy_cases(max(WORLDS)))
    everything = types * len(REPAIRS) * len(sizes(max(WORLDS), 1))
    with_peers = [world for world in WORLDS if world > 1]

    def met(worlds: Iterable[int], losses: Iterable[str]) -> int:
        found = (one for at in product(worlds, losses) for one in meetings(*at))
        return len({(case.name, *rest) for case, *rest in found})

    for loss in LOSSES:
        assert met(with_peers, [loss]) == everything
    for world in with_peers:
        assert met([world], LOSSES) == everything


@pytest.mark.parametrize(
    "loss",
    ["", "loss=0.1,seed=3", "loss=0.5,burst=4,seed=4", "link=0-1:0.5,link=2-1:0.3,seed=5"],
)
@pytest.mark.parametrize("world", [2, 3, 5])
def test_reliable_delivers_everything(world: int, loss: str) -> None:
    dropped = 0
    with Network(world, PAYLOAD, inject=loss) as network:
        for case in CASES:
            for count in (1, PAYLOAD // 4 + 1, 2000):
                dtype = "f32" if case.sums else "bytes"
                dropped += check(network, case, count, dtype, loss, reliable=True)
    assert (dropped > 0) == bool(loss)


@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_needed_packets_come_and_no_others(world: int, repair: int) -> None:
    """What a receiver needs is resent until it is there; the rest is lost as ever."""
    needs, missed, loss = 0, 0, "loss=0.5,seed=13"
    with Network(world, PAYLOAD, inject=loss) as network:
        for count in (1, PAYLOAD, 20 * PAYLOAD + 3):
            ended, needed = check_needed(network, count, loss, 0.4, repair=repair)
            needs += needed
            missed += sum(one.report.packets_missing for one in ended)
        for engine in network.engines:
            rates = [engine.peer_stats(p) for p in range(world) if p != engine._where.rank]
            assert all(r.delivered <= r.offered for r in rates)
    assert needs > 0
    assert missed > 0


@pytest.mark.parametrize("loss", ["loss=0.5,seed=14", "loss=0.4,burst=300,seed=15", "loss=1"])
@pytest.mark.parametrize("repair", REPAIRS)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_senders_learn_what_was_given_up(world: int, repair: int, loss: str) -> None:
    reported, per_packet = 0, PAYLOAD // 4
    with Network(world, PAYLOAD, inject=loss) as network:
        for count in (1, per_packet, 20 * per_packet + 3, 300 * per_packet):
            reported += check_reported_loss(network, count, loss, repair=repair)[1]
    assert reported > 0


@pytest.mark.parametrize("loss", ["", "loss=0.3,burst=3,seed=4"])
def test_engines_collect_and_spread_what_the_executor_does(loss: str) -> None:
    """One rank in four gives nothing, one owns nothing; what is lost is left as it was."""
    world, count, missing = 4, 9 * 352 + 17, 0
    gives = (True, True, False, True)
    lengths = owners.owned(count, 352, (1, 3, 0, 2))
    inject = faults.parse(loss)
    rng = np.random.default_rng(6)
    with Network(world, 1408, inject=loss) as network:
        for plans in (
            [owners.collect(world, r, lengths, gives, 352) for r in range(world)],
            [owners.spread(world, r, lengths, 352) for r in range(world)],
        ):
            values = [rng.standard_normal(count).astype(np.float32) for _ in range(world)]
            outputs = [np.full(plan.out_elements, -1, np.float32) for plan in plans]
            wanted = [output.copy() for output in outputs]
            lost = partial(masks.lost, inject, GROUP, network.op)
            ended = network.run(plans, values, outputs, "f32")
            results = execute(plans, values, wanted, "f32", 1.0, lost, 0)
            for one, result, got, want in zip(ended, results, outputs, wanted, strict=True):
                assert (one.code, one.report.packets_missing) == (0, result.packets_missing)
                np.testing.assert_array_equal(got, want)
                missing += result.packets_missing
    assert (missing > 0) == bool(loss)


def test_a_link_that_brings_nothing_is_given_up_though_it_is_needed() -> None:
    with Network(2, PAYLOAD, inject="loss=1", deadline_min=0.3, deadline_max=0.5) as network:
        plans = [copies.all_gather(2, r, 3 * PAYLOAD, PAYLOAD) for r in range(2)]
        blocks = [
            Blocks(plans[r], [3 * PAYLOAD] * 2, PAYLOAD, np.ones((2, 3), np.bool_))
            for r in range(2)
        ]
        into = [np.full(3 * PAYLOAD, r + 1, np.uint8) for r in range(2)]
        out = [np.zeros(6 * PAYLOAD, np.uint8) for r in range(2)]
        tickets = [
            network.submit(r, plans[r], (into[r], out[r]), "bytes", needed=blocks[r].encoded())
            for r in range(2)
        ]
        for r in range(2):
            ended = network.end(r, tickets[r], note=partial(blocks[r].note, network.engines[r]))
            assert (ended.code, ended.report.cause) == (0, Cause.DEADLINE)
            assert ended.report.packets_injected > 3, "it was not asked for again"
            assert blocks[r].arrived.tolist() == [[own == r] * 3 for own in range(2)]


@pytest.mark.parametrize("loss", ["", "loss=0.1,burst=8,seed=21"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_millions_of_elements(world: int, loss: str) -> None:
    with Network(world, 1408, inject=loss) as network:
        for case in (case for case in CASES if case.way.millions):
            # Their count is that of one rank's part, and every rank holds all parts.
            parts = world if case.algorithm.collective in ("all_gather", "all_to_all") else 1
            check(network, case, 2_000_003 // parts, "f32", loss)
            check(network, case, 1_000_001 // parts, "bf16", loss, repair=1)
