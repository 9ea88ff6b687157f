"""A rank stops and comes back, leaves, ends or forks: what the others see, and what it sees."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.failure_cases import (
    CALM,
    LIVENESS,
    QUIET,
    SLACK,
    Caught,
    catch,
    good,
    must_name_the_lost,
)
from tests.support.harness import Ranks, await_ranks, init, note, run_good
from tests.support.links import over, over_each_link
from tests.support.waiting import until

TIMEOUT = 60.0
"""Seconds: of every call, where nothing else ends it."""
PROMPT = TIMEOUT / 3
"""What ends within it, on a starved machine as well, has waited for no timeout."""

# ---- stopped and continued ----


def rank_sums(rank: int, world: int) -> Any:
    """Sums until it fails, each sum the right one; returns the failure."""
    import torch
    import torch.distributed as dist

    init()
    t = torch.ones(200_000)
    for count in range(10**9):
        begin = time.monotonic()
        caught = catch(lambda: dist.all_reduce(t.fill_(1)))
        if caught.kind:
            break
        assert (t == world).all(), "a pause was taken for loss"
        if count == 3:
            note("ready")
        if count > 3 and time.monotonic() - begin > 0.4:
            note("a long call")
    dist.destroy_process_group()
    return caught


PATIENT = 6.0
"""A liveness that a pause of this test can't reach, however slow the machine is."""


@over_each_link
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_rank_that_is_stopped_is_waited_for_and_then_given_up(victim: int, link: str) -> None:
    env = {**QUIET, "LOSSYCOLL_LIVENESS": str(PATIENT), **over(link)}
    with Ranks(rank_sums, 3, env) as ranks:
        for number in range(3):
            ranks.wait_for(number, "ready", 200)
        ranks.signal(victim, signal.SIGSTOP)
        time.sleep(1)
        ranks.signal(victim, signal.SIGCONT)
        for number in range(3):
            if number != victim:
                ranks.wait_for(number, "a long call")
        time.sleep(0.5)
        assert all(process.poll() is None for process in ranks.processes), "a pause was an error"
        since = ranks.signal(victim, signal.SIGSTOP)
        survivors = ranks.collect(200, but=[victim])
        assert ranks.processes[victim].poll() is None
        back = ranks.signal(victim, signal.SIGCONT)
        stopped = ranks.collect(220)[victim]
    for outcome, caught in zip(survivors, good(survivors), strict=True):
        must_name_the_lost(
            caught,
            "all_reduce",
            rank=outcome.rank,
            world=3,
            victim=victim,
            since=since,
            liveness=PATIENT,
        )
        assert caught.when - since > 0.25 * PATIENT, "a pause is taken for death"
        assert "liveness 6 s" in caught.text
    (caught,) = good([stopped])
    # Rank 0 judged the others, which had left when it came back; it reports to the others.
    expected = {"AbortedError", "PeerLostError"} if victim == 0 else {"AbortedError"}
    assert caught.kind in expected, caught
    assert f"rank {victim}/3" in caught.text
    assert back < caught.when < back + PATIENT + SLACK, caught


# ---- a rank that ends ----


WAYS = {1: "return", 2: "raise", 3: "sys.exit", 4: "os._exit"}
CODES = {1: 0, 2: 1, 3: 1, 4: 9}
"""The exit status that is then right (the harness makes 1 of every exception)."""


def rank_exits(rank: int, world: int) -> Any:
    """Ranks 1 to 4 end in the way that is theirs, with work pending; 0 and 5 wait for them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    init(TIMEOUT)
    store = _get_default_store()
    groups = {way: dist.new_group([0, way, 5], backend="lossy") for way in WAYS}
    t = torch.ones(60_000)
    dist.barrier()
    store.set(f"past/{rank}", "")
    if rank in WAYS:
        # What others still need of the barrier would end with this process.
        await_ranks("past", range(world))
        group = groups[rank]
        works = [dist.all_reduce(t.clone(), group=group, async_op=True) for _ in range(3)]
        works.append(dist.irecv(torch.ones(4), 0, group=group))
        works[0].get_future().then(lambda done: done.value())
        store.set(f"leaving/{rank}", "")
        note(f"leaving at {time.monotonic()}")
        if rank == 2:
            raise ValueError("a bug of the user's")
        if rank == 3:
            sys.exit(7)
        if rank == 4:
            os._exit(9)
        return time.monotonic()
    # What those four wait for comes, if at all, once they leave.
    store.wait([f"leaving/{way}" for way in WAYS])
    for way, group in groups.items():
        health = group._health
        until(lambda h=health: h.failure or h.left(1), f"the end of rank {way}", seconds=TIMEOUT)
    return {
        way: [
            _until_it_fails(lambda g=group: dist.all_reduce(t, group=g)),  # type: ignore[misc]
            catch(lambda g=group, w=way: dist.recv(torch.ones(4), w, group=g)),  # type: ignore[misc]
        ]
        for way, group in groups.items()
    }


def _until_it_fails(call: Any) -> Caught:
    """A rank that left after it began a call may still have its share in that one."""
    for _ in range(4):
        caught = catch(call)
        if caught.kind:
            break
    return caught


@over_each_link
def test_a_rank_that_ends_with_work_pending_ends_at_once_and_is_missed(link: str) -> None:
    env = {**QUIET, "LOSSYCOLL_LIVENESS": str(PATIENT), **over(link)}
    with Ranks(rank_exits, 6, env) as ranks:
        left = []
        for number in WAYS:
            ranks.wait_for(number, "leaving", 200)
            left += re.findall(r"leaving at ([\d.]+)", ranks.output(number))
        assert len(left) == len(WAYS), left
        for number, code in CODES.items():
            assert ranks.processes[number].wait(30) == code, ranks.output(number)
        ended = time.monotonic()
        outcomes = ranks.collect(200)
    # Goodbyes take at most a second for each of the two groups, what is pending takes TIMEOUT.
    assert ended - max(map(float, left)) < PROMPT
    begin = min(map(float, left))
    for outcome, value in zip(outcomes[::5], good(outcomes[::5]), strict=True):
        for way, found in value.items():
            for caught in found:
                where = f"{WAYS[way]} at rank {outcome.rank}: {caught}"
                assert caught.kind == "PeerLostError", where
                # In its group of three, rank ``way`` of the job is number 1.
                assert "rank 1 (127.0.0.1:" in caught.text, where
                left = r"left the group (after call #\d|before its first call was done)"
                assert bool(re.search(left, caught.text)) == (way != 4), where
                assert begin < caught.when < ended + len(WAYS) * (PATIENT + SLACK), where


def rank_ends_in_order(rank: int, world: int) -> float:
    """No destroy, work that nobody waits for, an exception in flight: no fault at all."""
    import torch
    import torch.distributed as dist

    init(TIMEOUT)
    works = [dist.all_reduce(torch.ones(60_000), async_op=True) for _ in range(20)]
    works[3].get_future()
    return time.monotonic()


@over_each_link
def test_ranks_that_all_end_without_destroy_end_well(link: str) -> None:
    with Ranks(rank_ends_in_order, 2, {**CALM, **over(link)}) as ranks:
        outcomes = ranks.collect(200)
        ended = time.monotonic()
    assert ended - min(good(outcomes)) < PROMPT


# ---- fork ----


def rank_forks(rank: int, world: int) -> Any:
    """Children that use the group, end by every way, and leave the parent's group as it was."""
    import torch
    import torch.distributed as dist

    init()
    t = torch.ones(60_000)
    dist.all_reduce(t.fill_(1))
    pending = dist.all_reduce(torch.ones(60_000), async_op=True) if rank else None
    children = []
    for way in ("exit", "destroy", "sys.exit", "unused", "raise"):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 3
        try:
            if way != "unused":
                seen = [
                    catch(lambda: dist.all_reduce(torch.ones(60_000))),
                    catch(lambda: dist.send(torch.ones(4), 1 - rank)),
                    catch(dist.barrier),
                ]
                for caught in seen:
                    assert caught.kind == "ClosedError", caught
                    assert f"belongs to process {os.getppid()}" in caught.text, caught
            if way == "destroy":
                dist.destroy_process_group()
            code = 0
        finally:
            if way in ("exit", "destroy") or code:
                os._exit(code)
            if way == "raise":
                sys.stderr = open(os.devnull, "w")  # noqa: SIM115
                sys.excepthook = lambda *_: None
            # As a program ends that knows nothing of the group: atexit and all.
            _end_interpreter(1 if way == "raise" else 0)
    statuses = []
    for child in children:
        end = time.monotonic() + 60
        while (found := os.waitpid(child, os.WNOHANG))[0] == 0:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise AssertionError(f"child {len(statuses)} hangs")
            time.sleep(0.02)
        statuses.append(os.waitstatus_to_exitcode(found[1]))
    # The parent's group has heard nothing of it, even after a while.
    time.sleep(LIVENESS)
    if rank == 0:
        pending = dist.all_reduce(torch.ones(60_000), async_op=True)
    assert pending is not None
    pending.wait()
    for _ in range(3):
        dist.all_reduce(t.fill_(1))
        assert (t == world).all()
    dist.destroy_process_group()
    return statuses


def _end_interpreter(code: int) -> None:
    """Runs what sys.exit would run in the end, past the harness, which would write a result."""
    import ctypes

    ctypes.pythonapi.Py_Exit(code)


@over_each_link
def test_a_forked_child_is_refused_and_its_end_harms_nothing(link: str) -> None:
    for statuses in run_good(rank_forks, 2, {**CALM, **over(link)}):
        assert statuses == [0, 0, 0, 0, 1]


class Numbers:
    """A data set that can be pickled."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.full((4,), float(index))


def rank_loads(rank: int, world: int) -> list[float]:
    """Training with workers of a data loader, forked and spawned, while the group is in use."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    init()
    sums = []
    for context in os.environ["CONTEXTS"].split(","):
        total = torch.zeros(20_000)
        loader: Any = DataLoader(
            Numbers(),  # type: ignore[arg-type]
            batch_size=3,
            num_workers=1,
            multiprocessing_context=context,
        )
        for batch in loader:
            grad = torch.full((20_000,), float(batch.sum()))
            dist.all_reduce(grad)
            total += grad
        sums.append(float(total[0]))
    dist.destroy_process_group()
    return sums


@pytest.mark.parametrize(
    "contexts", [["fork"], pytest.param(["fork", "spawn"], marks=pytest.mark.long)]
)
def test_data_loaders_fork_and_spawn_while_a_group_is_in_use(contexts: list[str]) -> None:
    for sums in run_good(rank_loads, 2, {**CALM, "CONTEXTS": ",".join(contexts)}):
        assert sums == [2 * 4.0 * sum(range(12))] * len(contexts)


# ---- Ctrl-C ----


def rank_interrupted(rank: int, world: int) -> Any:
    """Waits in every way at once would need a main thread each, so one rank has one way."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    way = ["collective", "work", "future", "recv", "barrier", "silent"][rank]
    init(TIMEOUT)
    # One group of processes, as at a terminal.
    store = _get_default_store()
    if rank == 0:
        os.setpgid(0, 0)
        store.set("leader", str(os.getpid()))
    else:
        os.setpgid(0, int(store.get("leader")))
    dist.barrier()
    note("ready")
    t = torch.ones(60_000)
    waits: dict[str, Any] = {
        "collective": lambda: dist.all_reduce(t),
        "work": lambda: dist.all_reduce(t, async_op=True).wait(timedelta(seconds=50)),
        "future": lambda: dist.all_reduce(t, async_op=True).get_future().wait(),
        "recv": lambda: dist.recv(t, 5),
        "barrier": lambda: time.sleep(0.2) or dist.all_reduce(t),
        "silent": lambda: time.sleep(60),
    }
    waits[way]()


@over_each_link
def test_ctrl_c_of_all_ranks_ends_every_kind_of_wait(link: str) -> None:
    with Ranks(rank_interrupted, 6, {**QUIET, "LOSSYCOLL_LIVENESS": "60", **over(link)}) as ranks:
        for number in range(6):
            ranks.wait_for(number, "ready", 200)
        for number in range(6):
            ranks.wait_until_still(number)
        begin = time.monotonic()
        # At once, so that nobody hears of another's end before its own interrupt is there.
        os.killpg(ranks.processes[0].pid, signal.SIGINT)
        outcomes = ranks.collect(200)
        # Goodbyes take a second at most; far more are liveness and what the calls wait for.
        assert time.monotonic() - begin < PROMPT
    for outcome in outcomes:
        # An interrupt that a future held back may also come while the harness ends.
        assert outcome.code in {1, -signal.SIGINT}, str(outcome)
        if outcome.code == 1:
            kinds = {"KeyboardInterrupt", "PeerLostError", "RuntimeError"}
            held_back = outcome.rank == 2 and "KeyboardInterrupt" in outcome.stderr
            assert outcome.error in kinds or held_back, str(outcome)
        # Those that wait in the engine, and the one that just sleeps, are interrupted themselves;
        # a future's own wait can't be, but it ends with the group.
        if outcome.rank in (0, 1, 4, 5):
            assert outcome.error == "KeyboardInterrupt", str(outcome)


def rank_one_interrupted(rank: int, world: int) -> Any:
    import torch
    import torch.distributed as dist

    init()
    dist.barrier()
    note("ready")
    t = torch.ones(60_000)
    if rank == 0:
        until(lambda: os.path.exists(os.environ["GO"]), "the signal to rank 1", seconds=200)
        return _until_it_fails(lambda: dist.all_reduce(t))
    dist.all_reduce(t)  # rank 1 is interrupted, and so ends with a traceback
    return None


def test_ctrl_c_of_one_rank_is_heard_by_the_others(tmp_path: Path) -> None:
    go = tmp_path / "go"
    env = {**QUIET, "LOSSYCOLL_LIVENESS": str(PATIENT), "GO": str(go)}
    with Ranks(rank_one_interrupted, 2, env) as ranks:
        for number in range(2):
            ranks.wait_for(number, "ready", 200)
        ranks.wait_until_still(1)
        begin = ranks.signal(1, signal.SIGINT)
        ranks.processes[1].wait(60)
        go.touch()
        outcomes = ranks.collect(200)
    assert outcomes[1].error == "KeyboardInterrupt"
    caught = outcomes[0].value
    assert caught.kind == "PeerLostError", caught
    assert "rank 1 (127.0.0.1:" in caught.text
    assert "left the group" in caught.text
    assert begin < caught.when < begin + PATIENT + SLACK


def rank_joins(rank: int, world: int) -> Any:
    """Rank 0 of two: the other never comes."""
    import_module("torch.distributed")

    def join() -> None:
        note("joining")
        init(timeout=200)

    return catch(join)


def test_ctrl_c_ends_a_rendezvous() -> None:
    with Ranks(rank_joins, 2, QUIET, ranks=[0]) as ranks:
        ranks.wait_for(0, "joining", 200)
        ranks.wait_until_still(0)
        begin = ranks.signal(0, signal.SIGINT)
        (outcome,) = ranks.collect(200)
    caught = outcome.value
    assert caught.kind == "KeyboardInterrupt", caught
    assert caught.when - begin < PROMPT  # far below the timeout of 200 s
