"""Monitored barriers: who is missing is named, whatever else goes on."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lossycoll.errors import OperationTimeout
from tests.support.failure_cases import CALM, QUIET, catch
from tests.support.harness import Ranks, await_ranks, init, note, run_good
from tests.support.sniffed_job import SECRET


def rank_passes(rank: int, world: int) -> list[float]:
    init()
    group: Any = dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    took = []
    for late in range(world):
        if rank == late:  # comes when all others wait
            store.wait([f"{other} waits for {late}" for other in range(world) if other != late])
        else:
            store.set(f"{rank} waits for {late}", "")
        begin = time.monotonic()
        # A rank that comes late may be in a hurry, and rank 0 alone may name all.
        group.monitored_barrier(timedelta(seconds=30 + rank), wait_all_ranks=rank == late)
        store.set(f"{rank} is through {late}", "")
        took.append(time.monotonic() - begin)
        # Messages of users and any-source receives are none of the barrier's.
        received = torch.zeros(1)
        if rank == 0:
            for _ in range(world - 1):
                dist.recv(received)
        else:
            dist.send(torch.ones(1), 0)
    dist.barrier()
    dist.destroy_process_group()
    return took


@pytest.mark.parametrize("env", [{}, SECRET], ids=["clear", "sealed"])
def test_nobody_passes_before_all_have_come(env: dict[str, str]) -> None:
    for took in run_good(rank_passes, 3, {**CALM, **env}):
        assert max(took) < 30, "it waited for the timeout"


def rank_waits_before_the_last(rank: int, world: int) -> bool:
    init()
    group: Any = dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    if rank == world - 1:
        time.sleep(0.5)
        early = store.check(["passed"])
        group.monitored_barrier()
        dist.destroy_process_group()
        return bool(early)
    group.monitored_barrier()
    store.set("passed", "")
    dist.destroy_process_group()
    return False


def test_a_rank_that_has_reported_waits_for_the_last() -> None:
    assert run_good(rank_waits_before_the_last, 3, CALM) == [False] * 3


def rank_missing(rank: int, world: int, wait_all: bool) -> Any:
    """Ranks 0 and 1 wait for 2 and 3, which make another call once rank 0 has its error."""
    init()
    group: Any = dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    if rank < 2:
        caught = catch(lambda: group.monitored_barrier(timedelta(seconds=1), wait_all))
        store.set(f"rank {rank} has its error", "")
    else:
        store.wait(["rank 0 has its error", "rank 1 has its error"], timedelta(seconds=60))
        caught = catch(dist.barrier)
    return caught


def rank_missing_all(rank: int, world: int) -> Any:
    return rank_missing(rank, world, True)


def rank_missing_first(rank: int, world: int) -> Any:
    return rank_missing(rank, world, False)


@pytest.mark.parametrize(
    ("function", "names", "quoted"),
    [
        (rank_missing_all, ("rank 2 (127.0.0.1", "rank 3 (127.0.0.1"), "Ranks 2, 3 failed to"),
        (rank_missing_first, ("rank 2 (127.0.0.1",), "Rank 2 failed to"),
    ],
    ids=["all", "first"],
)
def test_rank_0_names_those_that_never_came(
    function: Any, names: tuple[str, ...], quoted: str
) -> None:
    found = run_good(function, 4, CALM)
    assert (found[0].kind, found[0].peer) == ("OperationTimeout", 2), str(found[0])
    assert f"{quoted} pass monitoredBarrier in 1000 ms" in found[0].text
    for one in found:  # it is the group's, also where the call was another
        for part in (*names, "didn't take part within 1 s"):
            assert part in one.text, str(one)
        assert len(names) == 2 or "rank 3 (" not in one.text, str(one)


def rank_alone(rank: int, world: int) -> Any:
    """Rank 0 doesn't come."""
    init()
    group: Any = dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    if rank:
        caught = catch(lambda: group.monitored_barrier(timedelta(seconds=0.1)))
        store.set("rank 1 has its error", "")
        return caught
    store.wait(["rank 1 has its error"], timedelta(seconds=60))
    return None


def test_rank_0_is_named_by_the_others() -> None:
    _, other = run_good(rank_alone, 2, CALM)
    assert (other.kind, other.peer) == ("OperationTimeout", 0), str(other)
    assert "rank 0 (127.0.0.1" in other.text


def rank_in_no_time(rank: int, world: int) -> Any:
    init()
    group: Any = dist.group.WORLD
    return catch(lambda: group.monitored_barrier(timedelta(0))) if rank == 0 else None


def test_no_time_at_all_is_refused_in_torchs_words() -> None:
    caught, _ = run_good(rank_in_no_time, 2, CALM)
    assert "Rank 0 timed out in monitoredBarrier after 0 ms" in caught.text


def rank_killed(rank: int, world: int) -> Any:
    init(timeout=60)
    group: Any = dist.group.WORLD
    dist.barrier()
    note("ready")
    if rank == 2:
        time.sleep(600)
    begin = time.monotonic()
    return catch(group.monitored_barrier), time.monotonic() - begin


@pytest.mark.parametrize("env", [{}, SECRET], ids=["clear", "sealed"])
def test_a_rank_that_is_killed_is_named_before_the_time_is_over(env: dict[str, str]) -> None:
    with Ranks(rank_killed, 3, {**QUIET, **env}) as ranks:
        for number in range(3):
            ranks.wait_for(number, "ready")
        ranks.signal(2, signal.SIGKILL)
        survivors = ranks.collect(60, but=[2])
    for outcome in survivors:
        assert outcome.value is not None, str(outcome)
        caught, seconds = outcome.value
        assert (caught.kind, caught.peer) == ("PeerLostError", 2), str(caught)
        assert seconds < 20, "it waited for the timeout"


def rank_left(rank: int, world: int) -> Any:
    init(timeout=60)
    group: Any = dist.group.WORLD
    dist.barrier()
    if rank == 2:
        dist.destroy_process_group()
        return None
    caught = catch(group.monitored_barrier)
    dist.distributed_c10d._get_default_store().set(f"caught/{rank}", "")
    await_ranks("caught", (0, 1))  # who ended before would have left the group as well
    return caught


def test_a_rank_that_has_left_is_named() -> None:
    for rank, caught in enumerate(run_good(rank_left, 3, CALM)[:2]):
        assert caught.kind == "PeerLostError", str(caught)
        assert "rank 2 (127.0.0.1" in caught.text, str(caught)
        assert "left the group" in caught.text, str(caught)
        # gloo's words, which say nothing at rank 0.
        reached = f"Rank {rank} successfully reached monitoredBarrier, but received errors"
        assert (reached in caught.text) == (rank != 0), str(caught)


def rank_disagrees(rank: int, world: int) -> Any:
    init()
    group: Any = dist.group.WORLD
    if rank == 0:
        return catch(group.monitored_barrier)
    return catch(lambda: dist.broadcast(torch.ones(10, dtype=torch.int16), 1, group=group))


def rank_waits_in_another_call(rank: int, world: int) -> Any:
    init()
    group: Any = dist.group.WORLD
    if rank:
        return catch(group.monitored_barrier)
    return catch(lambda: dist.all_reduce(torch.ones(10), group=group))


@pytest.mark.parametrize("function", [rank_disagrees, rank_waits_in_another_call])
def test_ranks_that_mean_different_calls_learn_it(function: Any) -> None:
    waits = 0 if function is rank_disagrees else 1
    caught = run_good(function, 2, CALM)[waits]
    assert caught.kind == "MismatchError", str(caught)
    assert "monitored_barrier" in caught.text


def rank_interrupted(rank: int, world: int) -> Any:
    init()
    group: Any = dist.group.WORLD
    dist.barrier()
    note("ready")
    if rank == 1:
        store = dist.distributed_c10d._get_default_store()
        store.wait(["interrupted"], timedelta(seconds=60))
        return catch(dist.barrier)
    try:
        group.monitored_barrier()
    except KeyboardInterrupt:
        dist.distributed_c10d._get_default_store().set("interrupted", "")
        return "interrupted"
    return None


def test_an_interrupted_one_ends_the_group() -> None:
    """A message of it may be on its way, so that ranks can't count on it again."""
    with Ranks(rank_interrupted, 2, CALM) as ranks:
        for number in range(2):
            ranks.wait_for(number, "ready")
        time.sleep(0.3)
        ranks.signal(0, signal.SIGINT)
        first, second = ranks.collect(60)
    assert first.value == "interrupted", str(first)
    assert second.value is not None, str(second)
    assert second.value.kind == "AbortedError", str(second.value)
    assert "monitored_barrier was interrupted halfway" in second.value.text


def rank_late(rank: int, world: int) -> Any:
    """Rank 0 has failed the group before the others make it."""
    init()
    store = dist.distributed_c10d._get_default_store()
    if rank:
        store.wait(["failed"])
    group: Any = dist.new_group(list(range(world)))
    if rank == 0:
        with pytest.raises(OperationTimeout, match="Rank 0 timed out in monitoredBarrier"):
            group.monitored_barrier(timedelta(0))
        store.set("failed", "1")
        return ""
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except OperationTimeout as error:
        return str(error)
    return "no error"


def test_a_group_that_another_rank_has_failed_by_a_call_is_made_all_the_same() -> None:
    found = run_good(rank_late, 3)
    assert all("Rank 0 timed out in monitoredBarrier" in text for text in found[1:])
