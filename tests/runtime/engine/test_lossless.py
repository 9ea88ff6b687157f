"""Nothing is lost at zero injected loss, over real sockets; and a rank that is late is no loss."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest

from lossycoll.options.texts import FAST_PATHS
from lossycoll.plan import copies, data_movement, reduce_scatter
from lossycoll.plan.order import draw_order
from lossycoll.runtime.engine.reports import Cause
from lossycoll.runtime.net.buffers import fitting_payload
from tests.oracle.codec import Array
from tests.support.engine_sums import (
    PATIENT,
    all_reduce,
    assert_exact,
    inputs_of,
    settled_stats,
    total,
)
from tests.support.network import GROUP, Ended, Network
from tests.support.waiting import until

UNTOUCHED = (53248, 106496)
"""What to ask for so that getsockopt reports 106496 and 212992: the kernel doubles it."""


# ---- zero injected loss loses nothing ----


@dataclass
class Job:
    """An all-reduce in flight, in place."""

    name: str
    inputs: list[Array]
    want: Array
    tickets: list[int]


def submit_all(network: Network, counts: tuple[int, ...], *, how: dict[str, object]) -> list[Job]:
    """All sizes in flight at once, in place; ring and transpose by turns."""
    world = network.world
    jobs = []
    for i, count in enumerate(counts):
        order = draw_order(5, GROUP, i, world)
        plans = all_reduce(network, ("ring", "transpose")[i % 2], count, order)
        inputs = inputs_of(network, plans, i)
        jobs.append((plans, Job(f"{plans[0].algorithm} {count}", inputs, total(inputs), [])))
    for plans, job in jobs:
        job.tickets.extend(
            network.submit(r, plans[r], (x, x), "f32", float(world), **how)
            for r, x in enumerate(job.inputs)
        )
    return [job for _, job in jobs]


def assert_lossless(network: Network, counts: tuple[int, ...], *, how: dict[str, object]) -> None:
    """Nothing may be missing and every sum is exact."""
    world = network.world
    for job in submit_all(network, counts, how=how):
        for rank in range(world):
            ended = network.end(rank, job.tickets[rank], 100)
            assert ended.code == 0, ended.failure
            assert ended.report.packets_missing == 0, network.engines[rank].stats()
            assert ended.report.cause == Cause.COMPLETE
        assert_exact(job.inputs, job.want, job.name)
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


@pytest.mark.parametrize("asked", UNTOUCHED)
def test_sixteen_ranks_choose_packets_that_fit(asked: int) -> None:
    """Half of what it promises is left for control, a quarter of a second of it. A thread that
    gets no processor for longer may lose packets, but no more than the kernel says it dropped."""
    payload = fitting_payload(8896, 2 * asked, 16)
    assert payload < 8896
    with Network(16, payload, socket_buffer=asked, **PATIENT) as network:
        jobs = submit_all(network, (1, 20_000, 300_001), how={})
        missing = sum(
            network.end(rank, ticket, 100).report.packets_missing
            for job in jobs
            for rank, ticket in enumerate(job.tickets)
        )
        time.sleep(0.25)  # an idle engine writes its figures every 100 ms at the latest
        dropped = sum(engine.stats().socket_overflow for engine in network.engines)
        print(f"{missing} packets are missing, the kernel dropped {dropped}")
        assert missing <= dropped
        for job in jobs if not missing else []:
            assert_exact(job.inputs, job.want, job.name)


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
    """Two seconds late, where a silent stream would be given up after one at the latest."""
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
            plans = [reduce_scatter.reduce_scatter(world, r, count, 352) for r in range(world)]
            inputs = inputs_of(network, plans, 99)
            chunks = [np.zeros(count, np.float32) for _ in range(world)]
            jobs.append((plans, inputs, chunks, np.split(total(inputs), world)))

        def submit(rank: int) -> list[int]:
            return [
                network.submit(rank, plans[rank], (given[rank], out[rank]), "f32", 4.0)
                for plans, given, out, _ in jobs
            ]

        tickets = {rank: submit(rank) for rank in range(world) if rank != late}
        time.sleep(2.0)
        tickets[late] = submit(late)
        for rank, mine in tickets.items():
            for ticket in mine:
                ended = network.end(rank, ticket, 10)
                assert ended.code == 0, ended.failure
                assert (ended.report.packets_missing, ended.report.deadline_hits) == (0, 0)
                assert (ended.report.elapsed > 1.9) == (rank != late)
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
    """Operation 0 waits for rank 1 while ranks 0 and 2 go through all that the engine has room for
    beside it: it must neither be forgotten nor mixed up with a newer one."""
    many, room = 600, 256  # LC_OPS in native/state.h
    with Network(3, 1408) as network:
        first = [data_movement.gather(3, r, (0, 1000, 0), 352) for r in range(3)]
        rest = [data_movement.gather(3, r, (0, 0, 10), 352) for r in range(3)]
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
        until(lambda: len(codes) == 2 * (room - 1), "as many newer operations", seconds=60)
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


def test_broadcasts_of_a_tree_wait_for_a_late_leaf() -> None:
    """A root only sends: nothing tells it of a live peer but the answer to its question."""
    world = 4
    with Network(world, 1408, deadline_min=0.2, deadline_max=0.6) as network:
        plans = [copies.broadcast(world, r, 20_000, 352, root=0) for r in range(world)]
        data = inputs_of(network, plans, 8)
        want = data[0].copy()
        late = [1, 2, 3]
        tickets = {0: network.submit(0, plans[0], (data[0], data[0]), "f32")}
        time.sleep(1.2)  # twice as long as a stream may be silent
        for rank in late:
            tickets[rank] = network.submit(rank, plans[rank], (data[rank], data[rank]), "f32")
        for rank in range(world):
            ended = network.end(rank, tickets[rank], 10)
            assert (ended.code, ended.report.packets_missing) == (0, 0)
        assert_exact(data, want, "broadcast")
