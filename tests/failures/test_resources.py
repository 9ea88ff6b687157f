"""A rank short of descriptors or memory: a typed error there, the reason on all ranks, no crash."""

from __future__ import annotations

import mmap
import os
import resource
import time
from datetime import timedelta
from typing import Any

from tests.support.failure_cases import CALM, catch, holdings, left_over
from tests.support.harness import run_good
from tests.support.links import over, over_each_link

TIMEOUT = 60.0
PROMPT = TIMEOUT / 3
"""Seconds: what ends within it, on a starved machine as well, has waited for no timeout."""
SPARE = (0, 1, 3, 6, 10, 15, 20, 25, 30, 35, 40, 50)
"""How many descriptors rank 1 may still open: from none to more than a group takes."""


def _spare_only(count: int) -> tuple[list[int], tuple[int, int]]:
    """Leaves this process ``count`` descriptors; returns what undoes it."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(fd) for fd in os.listdir("/proc/self/fd")}
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(max(used) + 1 - len(used))]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max([*taken, *used]) + 1 + count, limits[1]))
    return taken, limits


def rank_without_descriptors(rank: int, world: int) -> Any:
    import torch
    import torch.distributed as dist

    import lossycoll

    dist.init_process_group("gloo")
    out: dict[int, Any] = {}
    t = torch.ones(20_000)
    hosts: set[tuple[int, ...]] = set()

    def use(group: Any) -> None:
        dist.all_reduce(t.fill_(1), group=group)
        assert (t == world).all()
        hosts.add(lossycoll.topology(group).hosts)

    for spare in SPARE:
        dist.barrier()
        before = holdings()
        taken: list[int] = []
        if rank == 1:
            taken, limits = _spare_only(spare)
        made: list[Any] = []
        begin = time.monotonic()
        caught = catch(
            lambda: made.append(dist.new_group(backend="lossy", timeout=timedelta(seconds=TIMEOUT)))  # noqa: B023
        )
        seconds = caught.when - begin
        used = catch(lambda: use(made[0])) if made else None  # noqa: B023
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in taken:
                os.close(fd)
        if made:
            dist.destroy_process_group(made.pop())
        elif left := left_over(before):
            raise AssertionError(f"{spare}: {left}")
        out[spare] = (caught, seconds, used)
    dist.barrier()
    dist.destroy_process_group()
    return out, hosts


@over_each_link
def test_a_rank_without_descriptors_says_so_and_tells_the_others(link: str) -> None:
    ranks = run_good(rank_without_descriptors, 3, {**CALM, **over(link)}, timeout=200)
    for rank, (found, hosts) in enumerate(ranks):
        # With enough of them the ranks share memory; with fewer, rank 1 may do without.
        whole, partial = ((0, 0, 0), (0, 1, 0)) if link == "auto" else ((0, 1, 2),) * 2
        assert whole in hosts
        assert hosts <= {whole, partial}
        for spare, (caught, seconds, used) in found.items():
            where = f"{spare} spare, rank {rank}: {caught}"
            if caught.kind == "":
                assert used.kind == "", f"{where}, {used}"
                continue
            assert caught.kind == ("EngineError" if rank == 1 else "RendezvousError"), where
            for part in (f"rank {rank}/3", "rank 1/3", "ulimit"):
                assert part in caught.text, where
            # The reason is reported: nobody waits for the timeout.
            assert seconds < PROMPT, where
        assert found[0][0].kind, "the fault didn't happen"
        assert not found[SPARE[-1]][0].kind, "with enough of them it still fails"


def _memory_only(spare: int) -> tuple[int, int]:
    """Leaves this process ``spare`` bytes of address space; returns the limits until now.

    Threads that end give theirs back late, so it is tried whether no more can be had.
    """
    limits = resource.getrlimit(resource.RLIMIT_AS)
    while True:
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + spare, limits[1]))
        try:
            mmap.mmap(-1, 2 * spare).close()
        except OSError:
            return limits
        resource.setrlimit(resource.RLIMIT_AS, limits)
        time.sleep(0.01)


def rank_without_memory(rank: int, world: int) -> Any:
    """Rank 1 can't have what a call needs beside its tensors; each call in a group of its own."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    strided, plain = torch.ones(4 << 20, 2)[:, 0], torch.ones(4 << 20)
    rows = [torch.empty_like(plain) for _ in range(world)]
    calls: dict[str, Any] = {
        "all_reduce, strided": lambda g: dist.all_reduce(strided, group=g),
        "all_reduce": lambda g: dist.all_reduce(plain, group=g),
        "all_reduce of integers": lambda g: dist.all_reduce(plain.view(torch.int32), group=g),
        "broadcast, strided": lambda g: dist.broadcast(strided, 0, group=g),
        "all_gather": lambda g: dist.all_gather(rows, plain, group=g),
    }
    out = {}
    for name, call in calls.items():
        group = dist.new_group(backend="lossy", timeout=timedelta(seconds=TIMEOUT))
        dist.all_reduce(torch.ones(20_000), group=group)
        dist.barrier()
        limits = _memory_only(1 << 20) if rank == 1 else resource.getrlimit(resource.RLIMIT_AS)
        begin = time.monotonic()
        caught = catch(lambda: call(group))  # noqa: B023
        resource.setrlimit(resource.RLIMIT_AS, limits)
        again = catch(lambda: dist.barrier(group=group))  # noqa: B023
        out[name] = (caught, caught.when - begin, again)
        dist.barrier()
        dist.destroy_process_group(group)
    dist.barrier()
    dist.destroy_process_group()
    return out


def test_a_rank_without_memory_says_so_and_tells_the_others() -> None:
    # Large blocks come from the kernel, so that one that was freed doesn't serve again.
    env = {**CALM, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    ranks = run_good(rank_without_memory, 3, env, timeout=200)
    short = 0
    for name, (at_1, _, after) in ranks[1].items():
        short += at_1.kind == "EngineError"
        for rank, found in enumerate(ranks):
            caught, seconds, again = found[name]
            where = f"{name}, rank {rank}: {caught}, then {again}"
            assert seconds < PROMPT, where
            if after.kind == "":
                # Nothing was short, or only what forms rank 1's result from what had arrived:
                # then its call fails alone, and the group is as good as before.
                assert again.kind == "", where
                assert caught.kind in (("", "EngineError") if rank == 1 else ("",)), where
                continue
            assert caught.kind == ("EngineError" if rank == 1 else "AbortedError"), where
            assert again.kind == caught.kind, where
            for part in (f"rank {rank}/3", "rank 1/3: call #1 ", "memory"):
                assert part in caught.text, where
    assert short >= 3, f"the fault didn't happen: {ranks[1]}"
