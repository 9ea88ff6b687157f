"""Disagreement, silence, abort and close end operations in time; what has ended is left alone."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from lossycoll.errors import AbortedError, LossyError, MismatchError
from lossycoll.plan import hierarchical, ring
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.failures import Code
from lossycoll.runtime.engine.reports import Cause, Stream
from tests.oracle.codec import Array
from tests.support.engine_sums import (
    all_reduce,
    inputs_of,
    settled_stats,
)
from tests.support.network import Network
from tests.support.waiting import until

SOON = 30.0
"""Seconds. What must end at once ends within them on a loaded machine; an operation that isn't
ended waits for its timeout of 60 s."""


# ---- disagreement ----


@pytest.mark.parametrize("what", ["size", "dtype", "collective"])
@pytest.mark.parametrize("reliable", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_mismatch_is_reported_at_once_on_every_rank(world: int, reliable: bool, what: str) -> None:
    odd = world - 1
    with Network(world, 1408) as network:
        count = 100_000
        buffers = [np.zeros(count + 8, np.float64) for _ in range(world)]
        plans = all_reduce(network, "transpose", count)
        dtype = ["f32"] * world
        if what == "size":
            plans[odd] = hierarchical.all_reduce(world, odd, count + 8, 352)
        elif what == "dtype":
            dtype[odd] = "bf16"
        else:
            plans[odd] = ring.all_reduce(world, odd, count, 352)
        begin = time.monotonic()
        tickets = [
            network.submit(r, plans[r], (buffers[r], buffers[r]), dtype[r], reliable=reliable)
            for r in range(world)
        ]
        ended = [network.end(rank, ticket, SOON) for rank, ticket in enumerate(tickets)]
        assert time.monotonic() - begin < SOON
        for rank in range(world):
            failure = ended[rank].failure
            assert ended[rank].code == Code.MISMATCH, (rank, failure)
            assert failure.peer in ([odd] if rank != odd else range(odd))
            assert failure.mine != failure.theirs
            assert failure.mine[0] == plans[rank].signature
            assert ended[rank].report.cause == Cause.FAILED
            if what == "size":
                assert {failure.mine[1], failure.theirs[1]} == {count, count + 8}
            if what == "dtype":
                assert {failure.mine[2], failure.theirs[2]} == {0, 3}
        for rank in range(world):
            with pytest.raises(MismatchError):
                network.submit(rank, plans[rank], (buffers[rank], buffers[rank]), dtype[rank])


def test_mismatch_around_a_ring_reaches_the_neighbours() -> None:
    """Only they can know; the others learn it from the control plane."""
    world, odd = 4, 2
    with Network(world, 1408) as network:
        plans = all_reduce(network, "ring", 100_000)
        plans[odd] = ring.all_reduce(world, odd, 100_001, 352)
        data = [np.zeros(100_001, np.float32) for _ in range(world)]
        tickets = [network.submit(r, plans[r], (data[r], data[r]), "f32") for r in range(world)]
        for rank in (1, 2, 3):
            ended = network.end(rank, tickets[rank], SOON)
            assert ended.code == Code.MISMATCH
            assert (ended.failure.peer == odd) == (rank != odd)


# ---- silence ----


@pytest.mark.parametrize("reliable", [False, True])
@pytest.mark.parametrize("algorithm", ["ring", "transpose"])
def test_a_rank_that_never_submits_is_named(algorithm: str, reliable: bool) -> None:
    """Its neighbours know who it is: those that send to it, and those that it should send to."""
    world, absent = 3, 1
    with Network(world, 1408, deadline_min=0.2, deadline_max=0.5) as network:
        plans = all_reduce(network, algorithm, 10_000)
        data = inputs_of(network, plans, 1)
        begin = time.monotonic()
        tickets = {
            r: network.submit(
                r, plans[r], (data[r], data[r]), "f32", timeout=2.0, reliable=reliable
            )
            for r in range(world)
            if r != absent
        }
        for rank, ticket in tickets.items():
            engine = network.engines[rank]
            streams: list[Stream] = []

            def note(done: int, at: EngineGroup = engine, to: list[Stream] = streams) -> None:
                to.extend(at.streams(done))

            ended = network.end(rank, ticket, 10, note=note)
            pending = [one for one in streams if one.settled_ns == 0]
            assert pending
            assert {one.cause for one in pending} == {Cause.FAILED}
            assert time.monotonic() - begin > 1.9
            assert ended.code == Code.TIMEOUT
            assert ended.report.cause == Cause.FAILED
            assert ended.failure.peer == absent
            assert 1.9 < ended.report.elapsed < 3.9  # twice the timeout is too long


@pytest.mark.parametrize("algorithm", ["ring", "transpose"])
@pytest.mark.parametrize("moment", ["before", "amid"])
def test_a_silent_path_ends_at_the_deadline(algorithm: str, moment: str) -> None:
    """A peer's engine is closed: the others go on with the mean over what arrived."""
    world, gone, count = 3, 2, 400_000
    ceiling = 1.0
    with Network(world, 1408, deadline_min=0.2, deadline_max=ceiling, pace=4e6) as network:
        plans = all_reduce(network, algorithm, count)
        data = [np.full(count, float(1 + rank), np.float32) for rank in range(world)]
        stay = [r for r in range(world) if r != gone]
        if moment == "before":
            network.engines[gone].close()
            begin = time.monotonic()
            tickets = {r: network.submit(r, plans[r], (data[r], data[r]), "f32") for r in stay}
        else:
            # At the fixed rate the operation takes a tenth of a second at least.
            tickets = {
                r: network.submit(r, plans[r], (data[r], data[r]), "f32") for r in range(world)
            }
            until(lambda: network.engines[0].peer_stats(gone).packets_received > 0)
            network.engines[gone].close()
            begin = time.monotonic()
        for rank in stay:
            ended = network.end(rank, tickets[rank], 20)
            waited = time.monotonic() - begin
            assert ended.code == 0, ended.failure
            # Around the ring, rank 1 hears from rank 0 that the rest is not to be had.
            direct = algorithm == "transpose" or rank == 0
            assert ended.report.cause == (Cause.DEADLINE if direct else Cause.LOSS)
            assert (ended.report.deadline_hits > 0) == direct
            assert ended.report.packets_missing > 0
            assert 0.1 < waited < 3 * ceiling + 3
        # Means of subsets of {1, 2, 3}, packet by packet.
        means = {1.0, 1.5, 2.0, 2.5, 3.0}
        for rank in stay:
            assert set(np.unique(data[rank])) <= means
        if moment == "before":
            allowed = {1.5} if algorithm == "transpose" else {1.0, 1.5}
            for rank in stay:
                assert set(np.unique(data[rank])) <= {1.0 + rank, *allowed}
            assert 1.5 in data[1]


# ---- abort, death, close ----


@pytest.mark.parametrize("reliable", [False, True])
def test_abort_fails_what_is_pending_and_what_comes(reliable: bool) -> None:
    with Network(2, 1408) as network:
        plans = all_reduce(network, "ring", 1000)
        data = [np.ones(1000, np.float32) for _ in range(2)]
        tickets = [
            network.submit(0, plans[0], (data[0], data[0]), "f32", reliable=reliable)
            for _ in range(5)
        ]
        until(lambda: network.engines[0].stats().control_sent > 0)
        begin = time.monotonic()
        network.engines[0].abort(Code.ABORTED, 1)
        for ticket in tickets:
            ended = network.end(0, ticket, SOON)
            assert (ended.code, ended.failure.peer) == (Code.ABORTED, 1)
        assert time.monotonic() - begin < SOON
        with pytest.raises(AbortedError):
            network.submit(0, plans[0], (data[0], data[0]), "f32")


def test_close_returns_with_operations_pending_and_waited_for() -> None:
    network = Network(2, 1408)
    plans = all_reduce(network, "ring", 200_000)
    data = [np.ones(200_000, np.float32) for _ in range(2)]
    tickets = [network.submit(0, plans[0], (data[0], data[0]), "f32") for _ in range(120)]
    codes: list[int] = []

    def wait() -> None:
        try:
            while True:
                code = network.engines[0].wait(tickets[0], 0.1)
                if code != Code.PENDING:
                    codes.append(code)
                    return
        except LossyError:
            codes.append(Code.CLOSED)

    def submit() -> None:
        try:
            while True:  # many more than are taken up at once; only closing ends it
                network.submit(0, plans[0], (data[0], data[0]), "f32")
                submitted.append(len(submitted))
                time.sleep(0.001)
        except LossyError:
            refused.set()

    refused = threading.Event()
    submitted: list[int] = []
    threads = [threading.Thread(target=wait), threading.Thread(target=submit)]
    with network:
        for thread in threads:
            thread.start()
        until(lambda: len(submitted) > 100, "operations that nobody waits for")
        begin = time.monotonic()
    for thread in threads:
        thread.join(5)
    assert time.monotonic() - begin < SOON
    assert codes == [Code.CLOSED]
    assert refused.is_set()


def test_submitting_never_waits_for_a_peer() -> None:
    """A caller that is kept waiting could not be interrupted, nor go on to another group."""
    with Network(2, 1408) as network:
        plans = all_reduce(network, "transpose", 100)
        data = [[np.full(100, 1.0 + rank, np.float32) for _ in range(700)] for rank in range(2)]
        begin = time.monotonic()
        early = [network.submit(0, plans[0], (x, x), "f32") for x in data[0]]
        assert time.monotonic() - begin < SOON
        late = [network.submit(1, plans[1], (x, x), "f32") for x in data[1]]
        for rank, tickets in enumerate((early, late)):
            assert {network.end(rank, ticket).code for ticket in tickets} == {0}
        assert all((x == 1.5).all() for x in data[0] + data[1])


@pytest.mark.parametrize("payload", [64, 65408])
def test_smallest_and_largest_packet(payload: int) -> None:
    with Network(2, payload) as network:
        plans = all_reduce(network, "transpose", 50_000)
        data = [np.full(50_000, 1.0 + rank, np.float32) for rank in range(2)]
        ended = network.run(plans, data, data, "f32")
        assert {e.code for e in ended} == {0}
        assert all((x == 1.5).all() for x in data)


def test_a_slow_link_is_not_a_silent_one() -> None:
    """The ceiling of the deadline is for silence: packets that keep coming are waited for."""
    with Network(2, 1408, pace=1e6, deadline_min=0.1, deadline_max=0.5) as network:
        plans = all_reduce(network, "transpose", 400_000)
        data = [np.full(400_000, 1.0 + rank, np.float32) for rank in range(2)]
        ended = network.run(plans, data, data, "f32")
        assert min(e.report.elapsed for e in ended) > 1.0, "the link was not slow"
        assert sum(e.report.packets_missing for e in ended) == 0
        assert all((x == 1.5).all() for x in data)


def test_close_amid_traffic() -> None:
    """With packets under way in both directions; the peer of the closed one is closed as well."""
    for delay in (0.0, 0.001, 0.004, 0.02):
        with Network(3, 1408) as network:
            plans = all_reduce(network, "ring", 500_000)
            data = [np.ones(500_000, np.float32) for _ in range(3)]
            for _ in range(3):
                for r in range(3):
                    network.submit(r, plans[r], (data[r], data[r]), "f32")
            time.sleep(delay)
            begin = time.monotonic()
        assert time.monotonic() - begin < SOON


# ---- after the end ----


def test_nothing_touches_memory_after_the_end() -> None:
    """Buffers are poisoned when an operation has ended, while its packets still come: those that
    injection doubles and delays, and copies of real datagrams sent again by hand."""
    world, count = 2, 20_000
    inject = "loss=0.2,dup=0.3,reorder=0.3,seed=4"
    with Network(world, 1408, inject=inject) as network:
        old: list[Array] = []
        for turn in range(40):
            algorithm = ("ring", "transpose")[turn % 2]
            plans = all_reduce(network, algorithm, count)
            data = [np.full(count, float(rank + 1), np.float32) for rank in range(world)]
            inputs = [x.copy() for x in data]
            ended = network.run(plans, inputs, data, "f32", repair=turn % 3)
            assert all(e.code == 0 for e in ended)
            for array in (*data, *inputs):
                array[:] = -77
                old.append(array)
        stats = [settled_stats(network, rank) for rank in range(world)]
        assert sum(s.packets_duplicated for s in stats) > 100
        assert sum(s.packets_reordered for s in stats) > 100
        assert sum(s.repeated + s.stale for s in stats) > 100
        for array in old:
            assert (array == -77).all()
