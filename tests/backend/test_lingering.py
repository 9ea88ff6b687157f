"""A rank that only sends has its call done at once; what becomes of that later reaches its next
call, and its leaving doesn't take along what others need."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from lossycoll.errors import LossyError, MismatchError
from tests.support.harness import init, run_good, run_ranks
from tests.support.links import over, over_each_link


def broadcast(value: float, elements: int = 1000) -> torch.Tensor:
    tensor = torch.full((elements,), value)
    dist.broadcast(tensor, 0)
    return tensor


def after_root(rank: int) -> None:
    """The root's call is done before the others go on."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("root is done", "")
    else:
        store.wait(["root is done"])


def rank_root_is_not_kept(rank: int, world: int) -> tuple[float, list[float]]:
    """When the last call began, or at the root when leaving was over; and what the calls gave."""
    init(timeout=60)
    dist.barrier()
    if rank:
        after_root(rank)
    got = []
    for i in range(3):
        begin = time.monotonic()
        got += broadcast(float(i) if rank == 0 else -1.0).unique().tolist()
    if rank == 0:
        after_root(rank)
    dist.destroy_process_group()
    return (begin if rank else time.monotonic()), got


@over_each_link
def test_a_root_is_done_at_once_and_its_leaving_waits_for_late_ranks(link: str) -> None:
    root, *others = run_good(rank_root_is_not_kept, 3, over(link))
    for _, got in (root, *others):
        assert got == [0.0, 1.0, 2.0]
    assert all(root[0] > begin for begin, _ in others)


def rank_disagrees(rank: int, world: int) -> list[str]:
    init(timeout=60)
    dist.barrier()
    said = []
    try:
        if rank == 0:
            broadcast(1.0, 100)
            said.append("done")
        after_root(rank)
        if rank:
            broadcast(1.0, 101)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            if os.environ["THEN"] == "monitored_barrier":
                assert dist.group.WORLD is not None
                dist.group.WORLD.monitored_barrier()
            else:
                dist.all_reduce(torch.ones(10))
    except LossyError as error:
        said += [type(error).__name__, str(error)]
    return said


@pytest.mark.parametrize("then", ["all_reduce", "monitored_barrier"])
def test_what_ends_a_call_after_it_was_done_is_raised_by_the_next(then: str) -> None:
    root, other = run_good(rank_disagrees, 2, {"THEN": then})
    assert root[0] == "done"
    for kind, text in (root[1:], other):
        assert kind == MismatchError.__name__
        assert "broadcast float32[100]" in text
        assert "broadcast float32[101]" in text


def rank_leaves_undelivered(rank: int, world: int) -> None:
    init(timeout=60)
    dist.barrier()
    if rank == 0:
        broadcast(1.0)
    after_root(rank)
    dist.destroy_process_group()


def test_a_root_says_when_it_leaves_that_others_never_took_part() -> None:
    root, other = run_ranks(rank_leaves_undelivered, 2)
    assert (root.error, other.error) == ("", "")
    # The second, where the other's goodbye comes before this rank begins to leave.
    said = ("other ranks may lack data of calls that were done here", "event=failed")
    assert any(text in root.stderr for text in said)
    assert "rank 1" in root.stderr
    assert "left the group after call #0" in root.stderr
