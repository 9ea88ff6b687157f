"""Groups of connected ranks: made by each rank alone, and compared by their first operation."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lossycoll.backend import bootstrap
from lossycoll.backend.bootstrap import _Askers
from lossycoll.backend.builder import WORLDS
from tests.support.failure_cases import CALM, Caught, catch
from tests.support.harness import Ranks, init, note, run_good
from tests.support.versions import TORCH


def count_meetings() -> list[int]:
    """How often this process meets others in the store from now on, as the length of a list."""
    meetings: list[int] = []

    class Counted(bootstrap.Rendezvous):
        def meet(self, *args: Any, **named: Any) -> list[Any]:
            meetings.append(1)
            return super().meet(*args, **named)

    bootstrap.Rendezvous = Counted  # type: ignore[misc]
    return meetings


def sums(group: Any) -> float:
    """The sum of ones over a group, which is its size."""
    t = torch.ones(10)
    dist.all_reduce(t, group=group)
    return float(t[0])


def early() -> int:
    """Messages that this process keeps for groups that it hasn't opened."""
    return sum(len(world.plane.protocol.groups._early) for world in WORLDS._worlds)


def rank_makes(rank: int, world: int) -> dict[str, Any]:
    init()
    meetings = count_meetings()
    out: dict[str, Any] = {}
    groups = [dist.new_group() for _ in range(200)]
    # Used and destroyed in another order on each rank: none waits for another group.
    works = [dist.barrier(group, async_op=True) for group in groups[rank:] + groups[:rank]]
    for work in works:
        work.wait()
    assert all(sums(group) == world for group in groups[::20])
    few = groups[:4]  # each waits a second for ranks that come to another one first
    for group in [*(few if rank % 2 else reversed(few)), *groups[4:]]:
        dist.destroy_process_group(group)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:  # its packets come before the group is there
        store.wait(["rank 0 has begun"])
    late = dist.new_group([0, 1])
    if rank < 2:
        ones = torch.ones(10)
        work = dist.all_reduce(ones, group=late, async_op=True)
        store.set(f"rank {rank} has begun", "")
        work.wait()
        out["late"] = float(ones[0])
        dist.destroy_process_group(late)
    # Before 2.14 torch gives the same name to both, of the ranks and the number of groups here.
    names, sessions = [], set()
    for _ in range(2):
        again = dist.new_group([0, 2], use_local_synchronization=True)
        if rank != 1:
            names.append(again.group_name)
            sessions.add(again._health.control.group)
            assert sums(again) == 2
            dist.destroy_process_group(again)
    out["again"] = (len(names) - len(set(names)), len(sessions))
    pair = dist.group.WORLD.split_group([0, 2])
    if pair is not None:
        one = pair.split_group([1])
        assert (one is None) == (rank == 0)
        assert sums(pair) == 2
        pair.shutdown()
    dist.barrier()
    out["meetings"] = len(meetings)
    dist.destroy_process_group()
    return out


def test_groups_are_made_without_the_store_in_any_number_order_and_time() -> None:
    again = (1 if TORCH < (2, 14) else 0, 2)
    first, second, third = run_good(rank_makes, 3, CALM, timeout=200)
    assert first == {"late": 2.0, "again": again, "meetings": 0}
    assert second == {"late": 2.0, "again": (0, 0), "meetings": 0}
    assert third == {"again": again, "meetings": 0}


DIFFERENT: dict[str, tuple[Callable[[int], tuple[Any, Any]], tuple[str, ...], list[str]]] = {
    # name: by rank its members and options; what all errors say; by rank the type of its error
    "option": (
        # One that no call of this test says: only the definition does.
        lambda rank: (None, {"lossy_min_bytes": 20} if rank == 1 else None),
        ("option lossy_min_bytes is ", "20 on rank 1", "16384 on rank ", "set LOSSYCOLL_LOSSY_"),
        ["RendezvousError"] * 3,
    ),
    "a default that is set": (
        lambda rank: (None, {"repair": 0} if rank == 1 else None),
        ("option repair is ", "0 on rank 1", "not set on rank ", "set LOSSYCOLL_REPAIR or pg_opt"),
        ["RendezvousError"] * 3,
    ),
    "members": (
        lambda rank: ([0, 1] if rank == 0 else [0, 1, 2], None),
        ("the group is of ranks 0, 1, 2 on rank ", " but of ranks 0, 1 on rank 0 (of the job)"),
        ["RendezvousError"] * 3,
    ),
    "members that don't know one another": (
        lambda rank: ([0, 2] if rank == 0 else [1, 2], None),
        ("the group is of ranks 1, 2 on rank 2 but of ranks 0, 2 on rank 0 (of the job)",),
        ["RendezvousError"] * 3,
    ),
    "a bad option": (
        lambda rank: (None, {"repair": 300} if rank == 1 else None),
        ("option repair is 300, wanted 0 to 255", "rank 1"),
        ["RendezvousError", "OptionError", "RendezvousError"],
    ),
    "a host of its own": (
        lambda rank: (None, {"mtu": 1500} if rank == 1 else None),
        ("rank 1", "asks for a socket of the group's own by mtu=1500, this rank doesn't"),
        ["RendezvousError"] * 3,
    ),
    "nothing": (lambda rank: (None, {"mtu": 1500}), (), [""] * 3),
}


def rank_differs(rank: int, world: int) -> dict[str, Caught]:
    init()
    out = {}
    for name, (ask, _, _) in DIFFERENT.items():
        members, options = ask(rank)

        def use(members: Any = members, options: Any = options) -> None:
            group = dist.new_group(members, pg_options=options)
            for _ in range(20):  # who agrees with some may be through with the first
                dist.all_reduce(torch.ones(20_000), group=group)
                time.sleep(0.1)

        out[name] = catch(use)
        dist.barrier()
    assert sums(None) == world, "the default group is as it was"
    assert not early(), "messages of groups that were never opened are kept"
    dist.destroy_process_group()
    return out


def test_ranks_that_differ_in_a_group_are_named_by_its_first_call_on_all() -> None:
    ranks = run_good(rank_differs, 3, CALM, timeout=200)
    for name, (_, parts, kinds) in DIFFERENT.items():
        for rank, kind in enumerate(kinds):
            caught = ranks[rank][name]
            assert caught.kind == kind, (name, rank, caught)
            for part in parts:
                assert part in caught.text, (name, rank, caught)


def rank_never_makes_it(rank: int, world: int) -> Caught | None:
    init()
    caught = None
    if rank != 1:
        # The first at whose end the time is over is rank 0, which waits for rank 1 itself.
        timeout = timedelta(seconds=50 if rank else 2)
        group = dist.new_group(timeout=timeout, use_local_synchronization=True)
        caught = catch(lambda: dist.barrier(group=group))
    dist.barrier()
    if rank == 1:  # what the others said of it has come by now, and is told when it is made
        caught = catch(lambda: dist.barrier(dist.new_group(use_local_synchronization=True)))
    dist.barrier()
    dist.destroy_process_group()
    return caught


def test_a_rank_that_never_makes_the_group_is_named_after_the_timeout() -> None:
    first, second, third = run_good(rank_never_makes_it, 3, CALM)
    for found in (first, third):
        assert found.kind == "OperationTimeout", found
        assert "rank 1 (127.0.0.1:" in found.text
    assert second.kind == "OperationTimeout", second
    assert "ended the group" in second.text


def rank_after_a_death(rank: int, world: int) -> Any:
    init()
    dist.barrier()
    note("ready")
    if rank == 1:
        time.sleep(600)
    with pytest.raises(RuntimeError):
        dist.barrier()
    begin = time.monotonic()
    everyone = catch(dist.new_group)
    pair = sums(dist.new_group([0, 2]))
    return everyone, time.monotonic() - begin, pair


def test_a_group_with_a_lost_rank_is_refused_at_once_and_one_without_is_made() -> None:
    with Ranks(rank_after_a_death, 3, CALM) as ranks:
        for number in range(3):
            ranks.wait_for(number, "ready")
        ranks.signal(1, signal.SIGKILL)
        first, third = ranks.collect(100, but=[1])
    for outcome in (first, third):
        assert outcome.value is not None, str(outcome)
        everyone, seconds, pair = outcome.value
        assert everyone.kind == "PeerLostError", everyone
        assert "lost rank 1 (127.0.0.1:" in everyone.text
        assert seconds < 20, "long before the timeout"
        assert pair == 2


def test_who_awaits_others_hears_all_that_the_control_plane_tells() -> None:
    from lossycoll.errors import PeerLostError
    from lossycoll.runtime.world.membership import Listener

    spec: Any = SimpleNamespace(rank=0, size=2)
    world: Any = SimpleNamespace(
        host=SimpleNamespace(addresses=["a", "b"]), plane=SimpleNamespace(liveness=1.0)
    )
    askers = _Askers(spec, world, (0, 1))
    listener: Listener = askers
    told = [name for name in vars(Listener) if name.startswith(("on_", "call_", "stats"))]
    assert len(told) == 13
    assert [name for name in told if not callable(getattr(listener, name, None))] == []
    listener.on_round()
    assert listener.stats() == {}
    listener.on_lost(1, 2.0, False)
    with pytest.raises(PeerLostError, match=r"lost rank 1 \(b\)"):
        askers.wait(1.0)
