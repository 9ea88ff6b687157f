"""A framework makes twenty groups of gloo, which lossy serves: they work, and leave nothing behind.
The same after the members have changed."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from lossycoll.backend.devices import HAS_BACKENDS
from tests.support.harness import await_ranks, run_good
from tests.support.members import Member, job_store
from tests.support.waiting import until

WORLD, GROUPS = 3, 20
REPLACES = {"LOSSYCOLL_REPLACE": "gloo"}


class Held(NamedTuple):
    threads: int
    sockets: int

    def within(self, other: Held) -> bool:
        """No more of either: a connection to a rank that has left may end meanwhile."""
        return self.threads <= other.threads and self.sockets <= other.sockets


def held() -> Held:
    """What this process has now."""
    sockets = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            sockets += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except FileNotFoundError:  # the folder that was listed
            continue
    return Held(len(os.listdir("/proc/self/task")), sockets)


def members_of(number: int, world: int) -> list[int]:
    """All ranks in turn with two of them, as frameworks make groups for parts of a model."""
    return list(range(world)) if number % 2 else [0, 1 + number // 2 % (world - 1)]


def add_up(group: Any, value: float) -> float:
    tensor = torch.full((4,), value)
    group.allreduce([tensor]).wait()
    return float(tensor[0])


class Lived(NamedTuple):
    """``base``: what the process held with the default group. ``more``: with all twenty, each of
    them used. ``less``: when they were destroyed."""

    base: Held
    more: Held
    less: Held


def live(
    rank: int, world: int, make: Callable[[list[int]], Any], end: Callable[[Any], None]
) -> Lived:
    """Makes the groups, uses them in two orders, and destroys them, the last one first."""
    # A group that was left before goes when its members need nothing of it any more.
    until(lambda: all(thread.name != "lossycoll-left" for thread in threading.enumerate()))
    base = held()
    groups: list[tuple[list[int], Any]] = []
    for number in range(GROUPS):
        members = members_of(number, world)
        group = make(members)
        if rank in members:
            assert type(group).__name__ == "LossyProcessGroup"
            groups.append((members, group))
    for members, group in groups + groups[::-1]:
        assert add_up(group, rank + 1.0) == sum(member + 1 for member in members)
    more = held()
    for _, group in groups[::-1]:  # the same on all ranks: each waits up to 1 s for the others
        end(group)
    del groups, group
    gc.collect()
    until(lambda: held().within(base))
    return Lived(base, more, held())


def check(lived: Lived) -> None:
    assert lived.more.within(lived.base), "groups of connected ranks use what there is"
    assert lived.less.within(lived.base)


def rank_replaces(rank: int, world: int) -> list[Any]:
    """Twice: what is left of the first time would be seen in the second."""
    found: list[Any] = []
    for _ in range(2):
        dist.init_process_group("gloo")
        dist.barrier()
        found.append(
            live(
                rank,
                world,
                lambda members: dist.new_group(members, backend="gloo"),
                dist.destroy_process_group,
            )
        )
        dist.barrier()
        dist.destroy_process_group()
        gc.collect()
        found.append(held())
    return found


def test_twenty_groups_of_a_framework() -> None:
    for first, after_first, second, after_second in run_good(
        rank_replaces, WORLD, REPLACES, fresh=True
    ):
        check(first)
        check(second)
        assert second.base == first.base
        assert after_first.sockets < first.base.sockets
        assert after_first.threads < first.base.threads
        assert after_second.within(after_first)


def rank_reconfigures(rank: int, world: int) -> list[Lived]:
    """Twenty groups of two members, of three when one has come as the first, and of the others."""
    member = Member(job_store(), rank, world)
    handles = member.handles("early")
    found = []
    for uuid, listed in ((7, handles[:2]), (8, handles[::-1]), (9, handles[:2])):
        if handles[rank] in listed:
            member.meet(uuid, listed)
            member.group.barrier().wait()
            place, size = member.place
            found.append(
                live(place, size, member.group.split_group, lambda group: group.shutdown())
            )
            member.group.barrier().wait()
    member.await_all("end")
    member.group.shutdown()
    return found


def test_twenty_groups_after_the_members_have_changed() -> None:
    found = run_good(rank_reconfigures, WORLD)
    assert [len(lives) for lives in found] == [3, 3, 1]
    for lived in itertools.chain(*found):
        check(lived)


def rank_replaces_and_reconfigures(rank: int, world: int) -> list[Lived]:
    dist.init_process_group("gloo", enable_reconfigure=True)
    assert dist.get_backend() == "lossy"
    store = dist.distributed_c10d._get_default_store()
    store.set(f"handle/{rank}", dist._get_reconfigure_handle())
    await_ranks("handle", range(world))
    handles = [store.get(f"handle/{each}").decode() for each in range(world)]
    found = []
    for uuid, listed in ((7, handles), (8, handles[:2])):
        if rank < len(listed):
            dist._reconfigure(uuid, listed).wait()
            dist.barrier()
            found.append(
                live(
                    rank,
                    len(listed),
                    lambda members: dist.new_group(members, backend="gloo"),
                    dist.destroy_process_group,
                )
            )
            dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.skipif(not HAS_BACKENDS, reason="torch 2.13 can't ask for it")
def test_twenty_groups_of_a_framework_after_the_members_have_changed() -> None:
    found = run_good(rank_replaces_and_reconfigures, WORLD, REPLACES, fresh=True)
    assert [len(lives) for lives in found] == [2, 2, 1]
    for lived in itertools.chain(*found):
        check(lived)
