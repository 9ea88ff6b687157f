"""Engines over shared memory: the same plans, the same faults, the same promises as by UDP."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import numpy as np
import pytest
from lossycoll._native import ffi, lib

from lossycoll.errors import LossyError
from lossycoll.options.fields import Options
from lossycoll.plan import Delivery, Plan, copies, hierarchical, reduce_scatter
from lossycoll.plan.copies import all_gather
from lossycoll.runtime.engine.failures import Code
from lossycoll.runtime.engine.host import Host
from tests.support import two_levels
from tests.support.shared_ranks import LINK, PAYLOAD, SHARED, SharedNetwork, launch, share, start
from tests.support.waiting import until

PER_PACKET = SHARED // 4


def ended(started: list[subprocess.Popen[bytes]], seconds: float = 60.0) -> list[tuple[int, str]]:
    """Exit code and output of each rank; none hangs."""
    try:
        return [(p.wait(seconds), p.stdout.read().decode() if p.stdout else "") for p in started]
    finally:
        for p in started:
            p.kill()
            p.communicate()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
def test_processes_get_the_exact_mean(world: int) -> None:
    assert [code for code, _ in ended(launch(world, "exact"))] == [0] * world


@pytest.mark.long
def test_messages_between_processes() -> None:
    assert [code for code, _ in ended(launch(3, "messages"))] == [0] * 3


@pytest.mark.long
def test_a_killed_process_is_an_error_for_the_others() -> None:
    first, second, third = ended(launch(3, "killed"))
    assert third[0] == -signal.SIGKILL, "the fault did not happen"
    for code, said in (first, second):
        assert code == 0
        assert re.search(r"rank 2", said), said


@pytest.mark.long
def test_a_stopped_process_is_waited_for() -> None:
    started = launch(2, "stopped")
    waited = os.waitpid(started[1].pid, os.WUNTRACED)
    assert os.WIFSTOPPED(waited[1]), "the fault did not happen"
    started[1].send_signal(signal.SIGCONT)
    assert [code for code, _ in ended(started)] == [0, 0]


def plans_of(name: str, world: int, count: int) -> list[Plan]:
    every = {
        "all_reduce": lambda r: hierarchical.all_reduce(world, r, count, PER_PACKET),
        "reduce_scatter": lambda r: reduce_scatter.reduce_scatter(world, r, count, PER_PACKET),
        "all_gather": lambda r: all_gather(world, r, count, PER_PACKET),
        "broadcast": lambda r: copies.broadcast(world, r, count, PER_PACKET, root=1),
    }
    return [every[name](rank) for rank in range(world)]


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_collectives(name: str) -> None:
    """Lossy ones too: nothing is lost in memory."""
    world = 4
    with SharedNetwork(world) as network:
        for count in (1, 200, PER_PACKET + 1, 40 * PER_PACKET + 7):
            for reliable in (False, True):
                plans = plans_of(name, world, count)
                inputs = [np.full(p.in_elements, r + 1, np.float32) for r, p in enumerate(plans)]
                outputs = [np.zeros(p.out_elements, np.float32) for p in plans]
                if name == "broadcast":
                    outputs = inputs
                for e in network.run(plans, inputs, outputs, "f32", reliable=reliable):
                    assert (e.code, e.report.packets_missing) == (0, 0), f"{e.failure} {e.report}"
                for rank, out in enumerate(outputs):
                    want = {
                        "all_gather": np.repeat(np.arange(1, world + 1), count),
                        "broadcast": 2.0,
                    }.get(name, (world + 1) / 2)
                    np.testing.assert_array_equal(out, want, err_msg=f"{rank} {count}")
        stats = [engine.stats() for engine in network.engines]
    assert sum(s.malformed + s.foreign + s.socket_overflow for s in stats) == 0


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather"])
def test_results_that_are_copied_past_the_caches(name: str, in_place: bool) -> None:
    """4 MiB and more (LC_LARGE_BYTES). What a rank keeps of its input is sent from there, unless
    the result lies in the same memory."""
    world, elements = 2, 2_200_003
    count = elements if name == "all_reduce" else elements // world
    random = np.random.default_rng(1)
    with SharedNetwork(world) as network:
        plans = plans_of(name, world, count)
        memory = [np.zeros(max(p.in_elements, p.out_elements), np.float32) for p in plans]
        inputs, outputs = [], []
        for rank, plan in enumerate(plans):
            whole, own = memory[rank], memory[rank][rank * count : (rank + 1) * count]
            inputs.append(own if name == "all_gather" else whole)
            inputs[rank][:] = random.integers(-99, 99, plan.in_elements)
            apart = np.full(plan.out_elements, np.nan, np.float32)
            there = own if name == "reduce_scatter" else whole
            outputs.append(there if in_place else apart)
        before = [x.copy() for x in inputs]
        for e in network.run(plans, inputs, outputs, "f32", reliable=True):
            assert (e.code, e.report.packets_missing) == (0, 0), f"{e.failure} {e.report}"
    mean = (before[0] + before[-1]) / 2
    for rank, out in enumerate(outputs):
        want = {
            "all_reduce": mean,
            "reduce_scatter": mean[rank * count : (rank + 1) * count],
            "all_gather": np.concatenate(before),
        }[name]
        np.testing.assert_array_equal(out, want)
        if not in_place:
            np.testing.assert_array_equal(inputs[rank], before[rank])


def test_hosts_within_a_world() -> None:
    """Two levels, each with the packets of its link: memory within a host, UDP between two."""
    topology = two_levels.Topology(((0, 1, 2), (3,)), Delivery(reliable=True), 46)
    count = 300_000
    with SharedNetwork(4, sharing=(0, 1, 2)) as network:
        plans = [two_levels.all_reduce(topology, 4, rank, count, PAYLOAD // 4) for rank in range(4)]
        data = [np.arange(count, dtype=np.float32) % 16 * (r + 1) for r in range(4)]
        for e in network.run(plans, data, data, "f32", reliable=True):
            assert e.code == 0, e.failure
        for out in data:
            np.testing.assert_array_equal(out, np.arange(count, dtype=np.float32) % 16 * 2.5)


def test_packets_that_a_link_does_not_carry_are_refused() -> None:
    with SharedNetwork(3, sharing=(0, 1)) as network:
        x = np.zeros(100, np.float32)
        with pytest.raises(LossyError, match="argument"):
            network.submit(0, hierarchical.all_reduce(3, 0, 100, PER_PACKET), (x, x), "f32")
        with pytest.raises(LossyError, match="argument"):
            network.submit(0, hierarchical.all_reduce(3, 0, 100, PER_PACKET + 1), (x, x), "f32")


def test_many_small_calls_wake_who_sleeps() -> None:
    """Callers that don't wait leave the work to threads, which sleep between calls."""
    with SharedNetwork(2) as network:
        plans = [hierarchical.all_reduce(2, rank, 100, PER_PACKET) for rank in range(2)]
        for i in range(200):
            data = [np.full(100, rank + i, np.float32) for rank in range(2)]
            for e in network.run(plans, data, data, "f32", reliable=bool(i % 2)):
                assert e.code == 0
            np.testing.assert_array_equal(data, i + 0.5)
        stats = [engine.stats() for engine in network.engines]
    assert sum(s.packets_missing + s.packets_resent for s in stats) == 0


def open_one(process: int = 0, processes: int = 3) -> Host:
    return Host(process, processes, "127.0.0.1", payload_bytes=PAYLOAD, options=Options())


@pytest.mark.parametrize("sharing", [[], [0], [1, 2], [1, 0], [0, 0], [0, 3]])
def test_who_cannot_share(sharing: list[int]) -> None:
    host, found, failure = open_one(), ffi.new("int[2]"), ffi.new("lc_failure *")
    code = lib.lc_host_share(host.handle, sharing, len(sharing), found, failure)
    assert code == failure.code == Code.ARGUMENT
    share(host, (0, 1))  # it is as before
    assert lib.lc_host_share(host.handle, [0, 1], 2, found, failure) == Code.ARGUMENT  # twice
    host.close()


def test_what_is_no_memory_is_refused() -> None:
    hosts = [open_one(process, 2) for process in range(2)]
    addresses = [("127.0.0.1", host.link().port) for host in hosts]
    own = share(hosts[0], (0, 1))
    other = share(hosts[1], (0, 1))
    plain = os.memfd_create("plain")
    os.ftruncate(plain, os.fstat(other[0]).st_size)
    for wrong in ((plain, other[1]), own, (-1, -1), (other[0], -1)):
        assert start(hosts[0], addresses, {1: wrong}) == Code.ARGUMENT
    assert start(hosts[0], addresses, {1: other}) == Code.OK
    os.close(plain)
    info = ffi.new("lc_link_info *")
    assert lib.lc_host_link(hosts[0].handle, LINK, info) == Code.OK
    assert info.payload_bytes == SHARED
    for host in hosts:
        host.close()


def test_descriptors_and_memory_are_given_back() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def mapped() -> int:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return sum("memfd:lossycoll" in line for line in maps)

    until(lambda: mapped() == 0, "an earlier test's memory unmapped")
    before = open_files()
    for _ in range(3):
        with SharedNetwork(3):
            assert mapped() == 9
    assert (open_files(), mapped()) == (before, 0)
