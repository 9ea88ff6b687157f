"""A rank is killed in the middle of every kind of call: each survivor learns which, in time."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from tests.support.failure_cases import (
    QUIET,
    SLACK,
    Caught,
    catch,
    catch_twice,
    good,
    holdings,
    left_over,
    must_name_the_lost,
)
from tests.support.harness import Ranks, init, note
from tests.support.links import over

WORLD = 3
PATIENT = 6.0
"""A liveness that 28 threads at each rank don't use up, however slow the machine is."""
SURVIVOR = 1
"""Where what only one rank receives goes."""


def _calls(victim: int) -> dict[str, Callable[[Any], Any]]:
    """Every kind of call, by name, in a form that waits for ``victim``; each takes its group."""
    import torch
    import torch.distributed as dist

    import lossycoll

    large, small = torch.ones(60_000), torch.ones(60)
    rows = lambda: [torch.empty(60) for _ in range(WORLD)]  # noqa: E731
    rank = dist.get_rank()

    def reliable(group: Any) -> None:
        with lossycoll.reliable():
            dist.all_reduce(large.clone(), group=group)

    def gather(group: Any) -> None:
        dist.gather(small, rows() if rank == SURVIVOR else None, SURVIVOR, group=group)

    def objects_gathered(group: Any) -> None:
        into = [None] * WORLD if rank == SURVIVOR else None
        dist.gather_object({"of": rank}, into, SURVIVOR, group=group)

    def functional(name: str, *rest: Any) -> Callable[[Any], Any]:
        """As a compiled program calls it: in C++, by the name of the group."""
        op = getattr(torch.ops._c10d_functional, name)

        def call(group: Any) -> None:
            torch.ops._c10d_functional.wait_tensor(op(large, *rest, group.group_name))

        return call

    return {
        "all_reduce": lambda g: dist.all_reduce(large.clone(), group=g),
        "all_reduce, reliable": reliable,
        "all_reduce of integers": lambda g: dist.all_reduce(small.long(), group=g),
        "all_reduce, future": lambda g: (
            dist.all_reduce(large.clone(), group=g, async_op=True).get_future().wait()
        ),
        "all_reduce of sparse": lambda g: dist.all_reduce(small.to_sparse(), group=g),
        "reduce": lambda g: dist.reduce(small.clone(), SURVIVOR, group=g),
        "reduce_scatter": lambda g: dist.reduce_scatter(
            torch.empty(60_000), [large] * WORLD, group=g
        ),
        "broadcast": lambda g: dist.broadcast(small.clone(), victim, group=g),
        "all_gather": lambda g: dist.all_gather(rows(), small, group=g),
        "gather": gather,
        "scatter": lambda g: dist.scatter(torch.empty(60), None, victim, group=g),
        "all_to_all": lambda g: dist.all_to_all(rows(), [small] * WORLD, group=g),
        "all_to_all_single": lambda g: dist.all_to_all_single(torch.empty(60), small, group=g),
        "barrier": lambda g: dist.barrier(group=g),
        "monitored_barrier": lambda g: g.monitored_barrier(),
        "recv": lambda g: dist.recv(torch.empty(60), victim, group=g),
        "recv from any": lambda g: dist.recv(torch.empty(60), group=g),
        "batch_isend_irecv": lambda g: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, torch.empty(60), victim, group=g)]
            )
        ],
        "all_gather_object": lambda g: dist.all_gather_object([None] * WORLD, "x", group=g),
        "broadcast_object_list": lambda g: dist.broadcast_object_list([None], victim, group=g),
        "gather_object": objects_gathered,
        "scatter_object_list": lambda g: dist.scatter_object_list([None], None, victim, group=g),
        "functional all_reduce": functional("all_reduce", "sum"),
        "functional all_gather": functional("all_gather_into_tensor", WORLD),
        "functional reduce_scatter": functional("reduce_scatter_tensor", "avg", WORLD),
        "functional broadcast": functional("broadcast", victim),
    }


def _backward(group: Any) -> Callable[[Any], Any]:
    """DDP is made while all ranks live, so that it is the backward pass that waits."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model: Any = DistributedDataParallel(torch.nn.Linear(300, 300), process_group=group)
    return lambda _: model(torch.ones(2, 300)).sum().backward()


ONE_SIDED = {"reduce", "gather", "gather_object"}
"""Of these only the receiver needs the victim: the other survivor may be through."""


def rank_in_every_call(rank: int, world: int, victim: int) -> Any:
    """Each call waits in a thread and a group of its own, all at once, until the victim dies."""
    import torch.distributed as dist

    import_module("torch.distributed.nn")  # after init its defaults would keep the group
    before = holdings()
    init()
    calls = _calls(victim)
    groups = {name: dist.new_group(backend="lossy") for name in [*calls, "DDP"]}
    calls["DDP"] = _backward(groups["DDP"])
    dist.barrier()
    if rank == victim:
        note("ready")
        time.sleep(600)
    caught: dict[str, Caught] = {}

    def run(name: str) -> None:
        caught[name] = catch_twice(lambda: calls[name](groups[name]))

    threads = [threading.Thread(target=run, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    time.sleep(1)
    early = dict(caught)
    note("ready")
    for thread in threads:
        thread.join()
    idle = catch(dist.barrier)
    begin = time.monotonic()
    dist.destroy_process_group()
    destroyed = time.monotonic() - begin
    # Gloo's threads end with the last reference to a group.
    groups.clear()
    calls.clear()
    gc.collect()
    return caught, early, idle, destroyed, left_over(before)


def rank_victim_0(rank: int, world: int) -> Any:
    return rank_in_every_call(rank, world, 0)


def rank_victim_2(rank: int, world: int) -> Any:
    return rank_in_every_call(rank, world, 2)


@pytest.mark.in_clear
@pytest.mark.parametrize(
    ("victim", "link"),
    [
        (0, "auto"),
        pytest.param(2, "auto", marks=pytest.mark.long),
        pytest.param(0, "udp", marks=pytest.mark.long),
    ],
)
def test_a_killed_rank_is_named_by_every_call_that_waits_for_it(victim: int, link: str) -> None:
    env = {**QUIET, "LOSSYCOLL_LIVENESS": str(PATIENT), **over(link)}
    with Ranks(f"{__name__}:rank_victim_{victim}", WORLD, env) as ranks:
        for number in range(WORLD):
            ranks.wait_for(number, "ready", 100)
        since = ranks.signal(victim, signal.SIGKILL)
        survivors = ranks.collect(70, but=[victim])
        assert ranks.processes[victim].wait(5) == -signal.SIGKILL
    for outcome, (caught, early, idle, destroyed, left) in zip(
        survivors, good(survivors), strict=True
    ):
        rank = outcome.rank
        fault: dict[str, Any] = {
            **{"rank": rank, "world": WORLD, "victim": victim},
            **{"since": since, "liveness": PATIENT},
        }
        for name, found in sorted(caught.items()):
            if name in ONE_SIDED and rank != SURVIVOR:
                assert found.again in {"", "PeerLostError"}, (name, found)
                continue
            assert name not in early, f"{name} at rank {rank} didn't wait: {early[name]}"
            must_name_the_lost(found, name, **fault)
            # Afterwards the group refuses at once, with the same reason.
            assert found.again in {"PeerLostError", found.kind}, (name, found)
            assert found.again_seconds < SLACK, (name, found)
        # The default group, in which nobody waited, is refused as well.
        must_name_the_lost(idle, "idle", **fault)
        assert destroyed < PATIENT + SLACK
        assert not left, left


def rank_leaves_a_child(rank: int, world: int) -> Any:
    """Rank 1 forks a child, and waits to be killed."""
    import torch
    import torch.distributed as dist

    init()
    dist.all_reduce(torch.ones(60_000))
    if rank == 1:
        fork = os.fork if os.environ["FORK"] == "os" else ctypes.CDLL(None).fork
        child = fork()
        if not child:
            time.sleep(600)
            os._exit(0)
        note(f"child {child} ")
        time.sleep(600)
    note("ready")
    return catch(lambda: dist.all_reduce(torch.ones(60_000)))


@pytest.mark.parametrize("fork", ["os", "libc"])
def test_a_killed_rank_is_named_though_a_child_that_it_has_forked_lives_on(fork: str) -> None:
    env = {**QUIET, "LOSSYCOLL_LIVENESS": str(PATIENT), "FORK": fork}
    with Ranks(rank_leaves_a_child, 2, env) as ranks:
        ranks.wait_for(0, "ready")
        ranks.wait_for(1, "child ")
        child = int(ranks.output(1).split("child ")[1].split()[0])
        try:
            since = ranks.signal(1, signal.SIGKILL)
            (survivor,) = ranks.collect(70, but=[1])
            os.kill(child, 0)  # it is there
        finally:
            os.kill(child, signal.SIGKILL)
    (caught,) = good([survivor])
    fault: dict[str, Any] = {
        "rank": 0,
        "world": 2,
        "victim": 1,
        "since": since,
        "liveness": PATIENT,
    }
    must_name_the_lost(caught, "all_reduce", **fault)
    # Python closes what a child would keep open; of one that C makes it knows nothing.
    assert ("its process has ended" in caught.text) == (fork == "os"), caught
