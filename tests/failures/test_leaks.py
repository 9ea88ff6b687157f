"""However a group ends, it takes its threads, sockets and other descriptors along."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.support.failure_cases import CALM, catch, holdings, left_over
from tests.support.harness import init, run_good
from tests.support.links import must_use_link, over, over_each_link
from tests.support.waiting import until

CYCLES = 20
PROMPT = float(CALM["LOSSYCOLL_LIVENESS"]) / 2
"""Seconds: what ends within it, on a starved machine as well, has waited for no limit but its own.
"""


def rank_cycles(rank: int, world: int) -> Any:
    import torch
    import torch.distributed as dist

    def cycle() -> None:
        init()
        t = torch.ones(60_000)
        dist.all_reduce(t)
        assert (t == world).all()
        dist.all_reduce(t, async_op=True).get_future().wait()
        if rank == 0:
            dist.send(t, 1)
        else:
            dist.recv(t, 0)
        dist.destroy_process_group()

    first = holdings()
    cycle()  # what is made once per process is no leak
    after_one, before = left_over(first), holdings()
    for _ in range(CYCLES):
        cycle()
    return after_one, left_over(before)


@over_each_link
def test_twenty_cycles_of_init_and_destroy_leave_nothing(link: str) -> None:
    for after_one, after_all in run_good(rank_cycles, 2, {**CALM, **over(link)}, timeout=200):
        assert not after_all
        assert not {name for name in after_one if "socket" in name or "lossycoll" in name}, (
            after_one
        )


def rank_ends(rank: int, world: int) -> dict[str, Any]:
    """Ends a group in every way that leaves the process alive, each time asking what is left."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    dist.init_process_group("gloo")
    store = _get_default_store()
    t = torch.ones(60_000)

    def pending(group: Any) -> None:
        """Rank 1 calls, the others don't: so the call never ends by itself."""
        if rank == 1:
            work = dist.all_reduce(t, group=group, async_op=True)
            work.get_future().then(lambda done: None)

    def destroy(group: Any) -> None:
        dist.all_reduce(t.fill_(1), group=group)
        dist.destroy_process_group(group)

    def destroy_pending(group: Any) -> None:
        pending(group)
        dist.destroy_process_group(group)

    def shutdown(group: Any) -> None:
        pending(group)
        group.shutdown()
        assert catch(lambda: dist.all_reduce(t, group=group)).kind == "ClosedError"
        dist.destroy_process_group(group)

    def abort(group: Any) -> None:
        pending(group)
        dist.barrier()  # else the call may come after the abort, and be refused
        if rank == 0:
            group.abort()
        else:
            # Rank 2 makes the call that rank 1 has pending: another one would be a mismatch, which
            # may be noticed before the abort is.
            caught = catch(lambda: dist.all_reduce(t.clone(), group=group))
            assert caught.kind == "AbortedError", caught
            assert "rank 0 (127.0.0.1:" in caught.text, caught
        dist.destroy_process_group(group)

    def times_out(group: Any) -> None:
        if rank == 1:
            caught = catch(lambda: dist.all_reduce(t, group=group))
            assert caught.kind == "OperationTimeout", caught
            assert "within 3 s" in caught.text, caught
            store.set("timed out", "")
        else:
            store.wait(["timed out"])
            until(lambda: group._health.failure, "rank 1's report", seconds=60)
            caught = catch(lambda: dist.all_reduce(t, group=group))
            assert caught.kind == "OperationTimeout", caught
            assert "rank 1 (127.0.0.1:" in caught.text, caught
        dist.destroy_process_group(group)

    def mismatch(group: Any) -> None:
        size = 60_001 if rank == 1 else 60_000
        assert catch(lambda: dist.all_reduce(torch.ones(size), group=group)).kind == "MismatchError"
        dist.destroy_process_group(group)

    def leaves(group: Any) -> None:
        if rank == 1:
            dist.destroy_process_group(group)
            return
        caught = catch(lambda: dist.all_reduce(t, group=group))
        assert caught.kind == "PeerLostError", caught
        dist.destroy_process_group(group)

    ways: dict[str, Callable[[Any], None]] = {
        "destroy": destroy,
        "destroy, pending": destroy_pending,
        "shutdown": shutdown,
        "abort": abort,
        "timeout": times_out,
        "mismatch": mismatch,
        "leaves": leaves,
    }
    dist.destroy_process_group(dist.new_group(backend="lossy"))  # what is made once is made
    out = {}
    for name, end in ways.items():
        dist.barrier()
        before = holdings()
        options = {"timeout": timedelta(seconds=3)} if name == "timeout" else {}
        group = dist.new_group(backend="lossy", **options)
        must_use_link(group)
        dist.barrier()
        begin = time.monotonic()
        end(group)
        seconds = time.monotonic() - begin
        del group
        gc.collect()  # a work and its future may refer to each other
        out[name] = (seconds, left_over(before))
    dist.barrier()
    before = holdings()
    refused = catch(
        lambda: dist.new_group(backend="lossy", pg_options={"repair": 300 if rank == 1 else 0})
    )
    assert refused.kind == ("OptionError" if rank == 1 else "RendezvousError"), refused
    out["refused"] = (0.0, left_over(before))
    return out


@over_each_link
def test_no_way_to_end_a_group_leaves_anything(link: str) -> None:
    for found in run_good(rank_ends, 3, {**CALM, **over(link)}, timeout=200):
        assert len(found) == 8
        for name, (seconds, left) in found.items():
            assert not left, (name, left)
            assert seconds < PROMPT, (name, seconds)


def rank_waits_shortly(rank: int, world: int) -> Any:
    """A timeout given to wait() is the caller's alone: the operation goes on."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    init()
    dist.barrier()
    store = _get_default_store()
    t = torch.ones(60_000)
    if rank == 1:
        store.wait(["ran out"])
        dist.all_reduce(t)
        dist.destroy_process_group()
        return None
    work = dist.all_reduce(t, async_op=True)
    begin = time.monotonic()
    caught = catch(lambda: work.wait(timedelta(seconds=0.3)))
    store.set("ran out", "")
    work.wait()
    assert (t == world).all()
    dist.destroy_process_group()
    return caught, caught.when - begin


def test_a_wait_that_runs_out_leaves_the_operation_going() -> None:
    (caught, seconds), _ = run_good(rank_waits_shortly, 2, CALM, timeout=200)
    assert caught.kind == "OperationTimeout", caught
    for part in ("rank 0/2", "call #1 all_reduce float32[60000]", "the 0.3 s given to wait()"):
        assert part in caught.text
    # Rank 1 hasn't called before: only the wait's own limit can have ended it.
    assert seconds >= 0.3, seconds
