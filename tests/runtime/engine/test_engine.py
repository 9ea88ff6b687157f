"""What the engine promises, over real sockets: nothing is lost at zero injected loss, skew is not
loss, disagreement and silence end in time, and what has ended is left alone."""

from __future__ import annotations

import socket
import threading
import time
from functools import partial

import numpy as np
import pytest

from lossycoll.errors import AbortedError, LossyError, MismatchError
from lossycoll.options.fields import FAST_PATHS
from lossycoll.plan import (
    Missing,
    Plan,
    data_movement,
    faults,
    packet_count,
    reference_executor,
    ring,
    transpose,
    tree,
)
from lossycoll.plan.order import draw_order
from lossycoll.plan.wire_types import Array
from lossycoll.runtime.engine.binding import EngineGroup
from lossycoll.runtime.engine.failures import Code
from lossycoll.runtime.engine.reports import Cause, PeerStats, Stream
from lossycoll.runtime.net.buffers import fitting_payload
from tests.support.network import GROUP, Ended, Network, elements
from tests.support.waiting import until

F32 = 4
PATIENT: dict[str, object] = {"reorder_min": 0.5}
"""A machine with more to do than processors delivers its own packets late, and out of order."""
SOON = 10.0
"""Seconds. What must end at once ends within them on a loaded machine; an operation that isn't
ended waits for its timeout of 60 s."""
UNTOUCHED = (53248, 106496)
"""What to ask for so that getsockopt reports 106496 and 212992: the kernel doubles it."""


def all_reduce(
    network: Network, algorithm: str, count: int, order: tuple[int, ...] | None = None
) -> list[Plan]:
    builder = {"ring": ring.all_reduce, "transpose": transpose.all_reduce}[algorithm]
    per_packet = network.payload_bytes // F32
    return [builder(network.world, r, count, per_packet, order=order) for r in range(network.world)]


def inputs_of(network: Network, plans: list[Plan], seed: int) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [elements("f32", plan.in_elements, rng) for plan in plans]


def total(inputs: list[Array]) -> Array:
    """The sum; exact, since the elements are small multiples of 1/8."""
    return np.sum(inputs, axis=0, dtype=np.float32)


def assert_exact(got: list[Array], want: Array, name: str) -> None:
    for rank, array in enumerate(got):
        np.testing.assert_array_equal(array, want, err_msg=f"{name} rank={rank}")


def settled_stats(network: Network, rank: int):  # type: ignore[no-untyped-def]
    """Figures that are up to date: an idle engine writes them every 100 ms at the latest."""
    time.sleep(0.25)
    return network.engines[rank].stats()


# ---- zero injected loss loses nothing ----


def assert_lossless(network: Network, counts: tuple[int, ...], *, how: dict[str, object]) -> None:
    """All sizes in flight at once, in place; nothing may be missing and every sum is exact."""
    world = network.world
    jobs = []
    for i, count in enumerate(counts):
        order = draw_order(5, GROUP, i, world)
        plans = all_reduce(network, ("ring", "transpose")[i % 2], count, order)
        inputs = inputs_of(network, plans, i)
        jobs.append((plans, inputs, total(inputs)))
    tickets = [
        [network.submit(r, p[r], (x[r], x[r]), "f32", float(world), **how) for r in range(world)]
        for p, x, _ in jobs
    ]
    for ticket, (plans, inputs, want) in zip(tickets, jobs, strict=True):
        for rank in range(world):
            ended = network.end(rank, ticket[rank], 100)
            assert ended.code == 0, ended.failure
            assert ended.report.packets_missing == 0
            assert ended.report.cause == Cause.COMPLETE
        assert_exact(inputs, want, f"{plans[0].algorithm} {len(want)}")
    for rank in range(world):
        stats = settled_stats(network, rank) if rank == 0 else network.engines[rank].stats()
        assert stats.packets_missing == 0
        # Nothing missing and nothing resent: the kernel dropped no data. Control that piled up
        # while the thread had no processor it may have; that is repeated.
        if how.get("reliable"):
            assert stats.socket_overflow == 0
        else:
            assert stats.packets_resent == 0
        assert stats.malformed == stats.foreign == 0


@pytest.mark.parametrize("payload", [1408, 8896])
@pytest.mark.parametrize("asked", UNTOUCHED)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_nothing_is_lost_in_small_buffers(world: int, asked: int, payload: int) -> None:
    # As a group does it: 8896 bytes of each of 7 peers are more than the smallest buffer holds.
    payload = fitting_payload(payload, 2 * asked, world)
    counts = (1, 300, 20_000, 1 << 20, 7, 65_536, 300_001)
    if world == 2:
        counts += (1 << 22,)  # 16 MiB
    with Network(world, payload, socket_buffer=asked, **PATIENT) as network:
        assert network.engines[0].link().receive_buffer == 2 * asked
        assert_lossless(network, counts, how={})


def test_sixteen_ranks_choose_packets_that_fit() -> None:
    payload = fitting_payload(8896, 2 * 53248, 16)
    assert payload < 8896
    with Network(16, payload, socket_buffer=53248, **PATIENT) as network:
        assert_lossless(network, (1, 20_000, 300_001), how={})


def test_nothing_is_lost_at_16_mib_on_8_ranks() -> None:
    with Network(8, 1408, socket_buffer=106496, **PATIENT) as network:
        assert_lossless(network, (1 << 22,), how={})


@pytest.mark.parametrize("disable", [*FAST_PATHS, ",".join(FAST_PATHS)])
@pytest.mark.parametrize("payload", [1408, 8896])
def test_nothing_is_lost_without_fast_paths(disable: str, payload: int) -> None:
    with Network(3, payload, socket_buffer=106496, disable=disable, **PATIENT) as network:
        assert not set(disable.split(",")) & set(network.engines[0].link().active)
        assert_lossless(network, (5, 100_000, 1 << 19, 1000), how={})


@pytest.mark.parametrize("how", [{"reliable": True}, {"repair": 2}])
def test_nothing_is_lost_or_resent_with_repair(how: dict[str, object]) -> None:
    with Network(3, 1408, socket_buffer=106496, **PATIENT) as network:
        assert_lossless(network, (5, 100_000, 1 << 19, 1000), how=how)


# ---- skew is not loss ----


@pytest.mark.parametrize("algorithm", ["ring", "transpose", "reduce_scatter", "all at once"])
def test_a_late_rank_loses_nothing(algorithm: str) -> None:
    """Three seconds late, where a silent stream would be given up after one at the latest."""
    world, late, count = 4, 1, 40_000
    with Network(world, 1408, deadline_min=0.3, deadline_max=1.0) as network:
        warm = all_reduce(network, "ring", 50_000)
        for turn in range(12):  # deadlines are learnt
            inputs = inputs_of(network, warm, turn)
            for ended in network.run(warm, inputs, inputs, "f32"):
                assert ended.report.packets_missing == 0
        jobs = []
        for i, name in enumerate(("ring", "transpose")):
            if algorithm in (name, "all at once"):
                plans = all_reduce(network, name, count)
                inputs = inputs_of(network, plans, 100 + i)
                jobs.append((plans, inputs, inputs, [total(inputs)] * world))
        if algorithm in ("reduce_scatter", "all at once"):
            plans = [transpose.reduce_scatter(world, r, count, 352) for r in range(world)]
            inputs = inputs_of(network, plans, 99)
            chunks = [np.zeros(count, np.float32) for _ in range(world)]
            jobs.append((plans, inputs, chunks, np.split(total(inputs), world)))

        def submit(rank: int) -> list[int]:
            return [
                network.submit(rank, plans[rank], (given[rank], out[rank]), "f32", 4.0)
                for plans, given, out, _ in jobs
            ]

        tickets = {rank: submit(rank) for rank in range(world) if rank != late}
        time.sleep(3.0)
        tickets[late] = submit(late)
        for rank, mine in tickets.items():
            for ticket in mine:
                ended = network.end(rank, ticket, 10)
                assert ended.code == 0, ended.failure
                assert (ended.report.packets_missing, ended.report.deadline_hits) == (0, 0)
                assert (ended.report.elapsed > 2.9) == (rank != late)
        ahead = settled_stats(network, late)
        assert ahead.eager_kept > 0
        assert ahead.eager_dropped == 0
        for _, _, out, want in jobs:
            for rank in range(world):
                np.testing.assert_array_equal(out[rank], want[rank])


@pytest.mark.parametrize(("eager", "most"), [(0, 0), (4 * 1600, 4), (1 << 20, 10_000)])
def test_no_more_is_sent_ahead_than_there_is_room_for(eager: int, most: int) -> None:
    """Of 114 packets, those that there is no room for wait for READY."""
    with Network(2, 1408, eager=eager) as network:
        plans = all_reduce(network, "transpose", 80_000)
        for turn in range(3):
            inputs = inputs_of(network, plans, turn)
            first = network.submit(0, plans[0], (inputs[0], inputs[0]), "f32", 2.0)
            time.sleep(0.3)
            want = total(inputs)
            second = network.submit(1, plans[1], (inputs[1], inputs[1]), "f32", 2.0)
            for rank, ticket in ((0, first), (1, second)):
                ended = network.end(rank, ticket, 10)
                assert ended.code == 0
                assert ended.report.packets_missing == 0
            assert_exact(inputs, want, f"eager={eager}")
        late = settled_stats(network, 1)
        assert late.eager_dropped == 0
        assert late.eager_kept == 3 * min(most, 114)


def test_a_rank_far_ahead_is_waited_for() -> None:
    """200 operations are more than are taken up at once: the rest waits in line."""
    world, many = 3, 200
    with Network(world, 1408, deadline_min=0.3, deadline_max=1.0) as network:
        plans = [all_reduce(network, ("ring", "transpose")[i % 2], 500 + i) for i in range(many)]
        inputs = [inputs_of(network, p, i) for i, p in enumerate(plans)]
        wants = [total(x) for x in inputs]

        def go(rank: int) -> None:
            tickets = [
                network.submit(rank, p[rank], (x[rank], x[rank]), "f32", 3.0)
                for p, x in zip(plans, inputs, strict=True)
            ]
            ended.extend(network.end(rank, ticket, 30) for ticket in tickets)

        ended: list[Ended] = []
        threads = [threading.Thread(target=go, args=(rank,)) for rank in range(world)]
        threads[0].start()
        time.sleep(1.5)
        assert network.engines[0].stats().operations == 0
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(ended) == many * world
        assert all(e.code == 0 and e.report.packets_missing == 0 for e in ended)
        for i in range(many):
            assert_exact(inputs[i], wants[i], f"op {i}")


def test_an_old_operation_survives_many_newer_ones() -> None:
    """Operation 0 waits for rank 1 while ranks 0 and 2 go through more than the engine has room
    for: it must neither be forgotten nor mixed up with a newer one."""
    many = 600
    with Network(3, 1408) as network:
        first = [
            data_movement.point_to_point(3, r, 1000, 352, sender=1, receiver=0) for r in range(3)
        ]
        rest = [data_movement.point_to_point(3, r, 10, 352, sender=2, receiver=0) for r in range(3)]
        sent = np.arange(1000, dtype=np.float32)
        got = np.zeros(1000, np.float32)
        small = np.arange(10, dtype=np.float32)
        taken = np.zeros((many, 10), np.float32)
        nothing = np.zeros(0, np.float32)

        def go(rank: int) -> None:
            mine = {0: (nothing, got), 1: (sent, nothing), 2: (nothing, nothing)}[rank]
            tickets = [network.submit(rank, first[rank], mine, "f32", reliable=True)]
            for i in range(many):
                pair = {0: (nothing, taken[i]), 1: (nothing, nothing), 2: (small, nothing)}[rank]
                tickets.append(network.submit(rank, rest[rank], pair, "f32", reliable=True))
                if rank != 1 and i >= 32:
                    codes.append(network.end(rank, tickets.pop(1), 30).code)
            codes.extend(network.end(rank, ticket, 30).code for ticket in tickets)

        codes: list[int] = []
        threads = [threading.Thread(target=go, args=(rank,)) for rank in range(3)]
        threads[0].start()
        threads[2].start()
        time.sleep(1.0)
        threads[1].start()
        for thread in threads:
            thread.join(60)
        assert codes == [0] * (3 * (many + 1))
        np.testing.assert_array_equal(got, sent)
        np.testing.assert_array_equal(taken, np.broadcast_to(small, taken.shape))


def test_many_small_operations_in_a_row() -> None:
    """Callers and progress threads meet in every order; none of it may end an operation early."""
    with Network(2, 1408) as network:
        plans = all_reduce(network, "transpose", 16)
        for _ in range(3000):
            data = [np.ones(16, np.float32), np.full(16, 2, np.float32)]
            for ended in network.run(plans, data, data, "f32", timeout=30.0):
                assert ended.code == 0, ended.failure
                assert 0 < ended.report.elapsed < 30
            assert data[0][0] == data[1][0] == 1.5


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
            plans[odd] = transpose.all_reduce(world, odd, count + 8, 352)
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
            # Twice the timeout is too long.
            assert 1.9 < time.monotonic() - begin < 3.9
            assert ended.code == Code.TIMEOUT
            assert ended.report.cause == Cause.FAILED
            assert ended.failure.peer == absent
            assert 1.9 < ended.report.elapsed < 3.9


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


# ---- the fixed rate ----


def test_a_fixed_rate_is_kept() -> None:
    """Bytes over a second stay below rate and burst, and near the rate; nothing is lost."""
    rate, count = 5e6, 2_500_000
    with Network(2, 1408, pace=rate) as network:
        plans = [
            data_movement.point_to_point(2, r, count, 352, sender=0, receiver=1) for r in range(2)
        ]
        sent = elements("f32", count, np.random.default_rng(1))
        got = np.zeros(count, np.float32)
        nothing = np.zeros(0, np.float32)
        begin = time.monotonic()
        tickets = [
            network.submit(0, plans[0], (sent, nothing), "f32"),
            network.submit(1, plans[1], (nothing, got), "f32"),
        ]
        time.sleep(0.2)
        first = (time.monotonic(), network.engines[0].peer_stats(1).packets_sent)
        time.sleep(1.0)
        second = (time.monotonic(), network.engines[0].peer_stats(1).packets_sent)
        ended = [network.end(r, ticket, 30) for r, ticket in enumerate(tickets)]
        took = time.monotonic() - begin
        between = (second[1] - first[1]) * 1456
        # The figures are up to 50 ms old each.
        assert between < rate * (second[0] - first[0] + 0.1) + 2 * 65536
        assert between > 0.3 * rate
        assert all(e.code == 0 and e.report.packets_missing == 0 for e in ended)
        assert ended[0].report.bytes_sent < rate * took + 2 * 65536
        assert took < 3 * ended[0].report.bytes_sent / rate
        np.testing.assert_array_equal(got, sent)


# ---- figures ----


def test_reports_count_contributions_and_what_is_missing() -> None:
    world, count = 4, 50_000
    inject = "loss=0.3,seed=9"
    with Network(world, 1408, inject=inject) as network:
        plans = [
            transpose.all_reduce(world, r, count, 352, missing=Missing.KEEP) for r in range(world)
        ]
        data = inputs_of(network, plans, 3)
        begins = [x.copy() for x in data]
        ended = network.run(plans, data, data, "f32", 4.0)
        want = reference_executor.execute(plans, begins, begins, "f32", 4.0, _lost(inject, 0), 0)
        for rank in range(world):
            report = ended[rank].report
            assert report.packets_missing == want[rank].packets_missing > 0
            assert report.packets_injected > 0
            assert report.kept == want[rank].kept > 0
            assert 1 <= report.contributions_min <= report.contributions_mean <= world
            assert report.contributions_mean < world
            assert report.elapsed > 0
            assert report.packets_sent > 0
            assert report.bytes_sent > report.packets_sent * 48
            slots = plans[rank].slots
            due = sum(len(slot.sources) * packet_count(slot.length, 352) for slot in slots)
            assert report.packets_received + report.packets_missing == due
            assert report.cause == Cause.LOSS
            assert network.engines[rank].last_report() == report
        mine, whole = network.engines[0], ended[0].report

        def by_peer() -> list[PeerStats]:
            return [mine.peer_stats(p) for p in range(1, world)]

        # The engine publishes its figures now and then.
        until(lambda: mine.stats().operations == 1)
        until(lambda: sum(p.packets_missing for p in by_peer()) == whole.packets_missing)
        until(lambda: sum(p.packets_received for p in by_peer()) == whole.packets_received)
        until(lambda: all(0.3 < p.delivery_rate < 0.95 for p in by_peer()))


def test_what_a_link_loses_shows_though_all_of_it_comes_back() -> None:
    loss = 0.05
    with Network(2, 1408, inject=f"loss={loss},seed=3") as network:
        plans = all_reduce(network, "transpose", 1_000_000)
        data = inputs_of(network, plans, 1)
        ended = network.run(plans, data, data, "f32", reliable=True)
        assert all(one.code == 0 and one.report.packets_missing == 0 for one in ended)
        for engine in network.engines:
            until(lambda at=engine: at.stats().operations == 1)  # type: ignore[misc]
            assert engine.stats().packets_missing == 0
            assert 0.5 * loss < engine.stats().resent_rate < 2 * loss


def _lost(inject: str, op: int) -> reference_executor.Lost:
    return partial(faults.lost, faults.parse(inject), GROUP, op)


def test_the_deadline_is_learnt() -> None:
    floor, ceiling = 0.05, 20.0
    with Network(2, 1408, deadline_min=floor, deadline_max=ceiling) as network:
        peer = network.engines[0].peer_stats(1)
        assert peer.deadline_ns in (0, int(ceiling * 1e9))
        plans = all_reduce(network, "ring", 100_000)
        for turn in range(20):
            data = inputs_of(network, plans, turn)
            network.run(plans, data, data, "f32")
        until(lambda: 0 < network.engines[0].peer_stats(1).deadline_ns < ceiling * 1e9)
        peer = network.engines[0].peer_stats(1)
        assert floor * 1e9 <= peer.deadline_ns < ceiling * 0.5e9
        assert 0 < peer.rtt_ns < 5e9


def test_broadcasts_of_a_tree_wait_for_a_late_leaf() -> None:
    """A root only sends: nothing tells it of a live peer but the answer to its question."""
    world = 4
    with Network(world, 1408, deadline_min=0.2, deadline_max=0.6) as network:
        plans = [tree.broadcast(world, r, 20_000, 352, root=0) for r in range(world)]
        data = inputs_of(network, plans, 8)
        want = data[0].copy()
        late = [1, 2, 3]
        tickets = {0: network.submit(0, plans[0], (data[0], data[0]), "f32")}
        time.sleep(2.0)
        for rank in late:
            tickets[rank] = network.submit(rank, plans[rank], (data[rank], data[rank]), "f32")
        for rank in range(world):
            ended = network.end(rank, tickets[rank], 10)
            assert (ended.code, ended.report.packets_missing) == (0, 0)
        assert_exact(data, want, "broadcast")


def test_an_idle_engine_ignores_what_is_not_a_packet() -> None:
    with Network(2, 1408) as network:
        port = network.engines[0].link().port
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as raw:
            for size in (0, 1, 47, 48, 1500):
                raw.sendto(bytes(size), ("127.0.0.1", port))
        until(lambda: network.engines[0].stats().malformed == 5)
