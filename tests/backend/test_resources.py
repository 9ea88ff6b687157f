"""What a process holds for its groups: docs/backend.md, "Life"."""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.support import harness

GROUPS = 10


class Held(NamedTuple):
    threads: int
    descriptors: int


def held() -> Held:
    # The directory that is listed is one of them, always.
    return Held(len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))


def holds(rank: int, world: int) -> list[Held]:
    """With the first group, with more, once each of them had a future, and after their end."""
    harness.init()
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    found = [held()]
    groups = [dist.new_group() for _ in range(GROUPS)]
    for group in groups:
        dist.all_reduce(ones, group=group)
    found.append(held())
    for group in groups:
        dist.all_reduce(ones, group=group, async_op=True).get_future().wait()
    found.append(held())
    dist.barrier()
    dist.destroy_process_group()
    found.append(held())
    return found


@pytest.mark.parametrize(("link", "fixed", "per_peer"), [("auto", 16, 1), ("udp", 13, 0)])
def test_what_a_process_holds_is_bounded_whatever_groups_it_has(
    link: str, fixed: int, per_peer: int
) -> None:
    world = 3
    ranks = harness.run_good(holds, world, {"LOSSYCOLL_LINK": link})
    for rank, (first, more, futures, ended) in enumerate(ranks):
        connections = world - 1 if rank == 0 else 1
        bound = fixed + per_peer * (world - 1) + connections
        assert first.descriptors - ended.descriptors <= bound
        assert more == first
        assert futures.descriptors == first.descriptors
        assert futures.threads == first.threads + 1, "one watcher for all groups"
        assert futures.threads <= 6, "two of them are libzmq's"
