"""What a process holds for its groups: docs/backend.md, "Life"."""

from __future__ import annotations

import os
import time
from statistics import median
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.support import harness

GROUPS = 20
CALLS = 8


class Held(NamedTuple):
    threads: int
    descriptors: int


def held() -> Held:
    # The directory that is listed is one of them, always.
    return Held(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))


class Found(NamedTuple):
    """``held``: with the first group, with more, once each of them had a future, with half of
    them destroyed, and after their end. ``seconds`` of a call, by group."""

    held: list[Held]
    seconds: list[float]


def holds(rank: int, world: int) -> Found:
    harness.init()
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    found = [held()]
    groups = [dist.new_group() for _ in range(GROUPS)]
    took: list[list[float]] = [[] for _ in groups]
    for _ in range(CALLS):  # in turns, so that what else the machine does meets all groups alike
        for group, seconds in zip(groups, took, strict=True):
            begin = time.perf_counter()
            dist.all_reduce(ones.fill_(1.0), group=group)
            seconds.append(time.perf_counter() - begin)
    found.append(held())
    for group in groups:
        dist.all_reduce(ones, group=group, async_op=True).get_future().wait()
    found.append(held())
    for group in groups[::-2]:  # not as they were made
        dist.destroy_process_group(group)
    found.append(held())
    for group in groups[::2]:
        dist.all_reduce(ones.fill_(1.0), group=group)
        assert ones[0] == world
        dist.destroy_process_group(group)
    dist.barrier()
    dist.destroy_process_group()
    found.append(held())
    return Found(found, [median(seconds) for seconds in took])


@pytest.mark.parametrize(("link", "fixed", "per_peer"), [("auto", 16, 1), ("udp", 13, 0)])
def test_what_a_process_holds_is_bounded_whatever_groups_it_has(
    link: str, fixed: int, per_peer: int
) -> None:
    world = 3
    ranks = harness.run_good(holds, world, {"LOSSYCOLL_LINK": link})
    for rank, found in enumerate(ranks):
        first, more, futures, fewer, ended = found.held
        connections = world - 1 if rank == 0 else 1
        authenticator = bool(os.environ.get("LOSSYCOLL_SECRET"))  # ZAP's, an eventfd
        bound = fixed + per_peer * (world - 1) + connections + authenticator
        assert first.descriptors - ended.descriptors <= bound
        assert more == first
        assert fewer == futures
        assert futures.descriptors == first.descriptors
        assert futures.threads == first.threads + 1, "one watcher for all groups"
        assert futures.threads <= 6, "two of them are libzmq's"
        early, late = median(found.seconds[:5]), median(found.seconds[-5:])
        assert max(early, late) < 5 * min(early, late), "calls cost more by the group's age"
