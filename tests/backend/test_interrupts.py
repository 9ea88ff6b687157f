"""Ctrl-C in the middle of a collective: the engine goes on writing to its buffers, so they stay."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import lossycoll
from lossycoll.plan import Topology
from lossycoll.runtime.collectives.endpoint import Endpoint
from lossycoll.runtime.collectives.group_context import GroupContext
from lossycoll.runtime.core.call import CallOptions, Collective, Operation
from lossycoll.runtime.engine.binding import DType
from lossycoll.runtime.world.group_state import Health
from tests.support import harness
from tests.support.network import Network
from tests.support.waiting import until

ELEMENTS = 2_000_000
PACE = 20_000_000
"""Bytes a second: of two ranks each sends 8 MB, in 0.4 s. Packets follow one another so closely
that the caller does the engine's work."""


def interrupted(rank: int, world: int) -> dict[str, Any]:
    harness.init()
    value = torch.full((ELEMENTS,), float(rank + 1))
    caught = False
    dist.barrier()
    if rank == 0:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with lossycoll.reliable():
            dist.all_reduce(value)
    except KeyboardInterrupt:
        caught = True
    early = value.unique().tolist()
    after = torch.full((50_000,), float(rank))
    dist.all_reduce(after)  # others than that one would have another number here
    until(lambda: value.unique().tolist() == [3.0], "the sum is complete", seconds=60)
    dist.barrier()
    out = {"caught": caught, "early": early, "sum": value.unique().tolist()}
    out["after"] = after.mean().item()
    dist.destroy_process_group()
    return out


def test_an_interrupted_call_goes_on_and_so_does_the_group() -> None:
    # The pace is for the network: memory that ranks share is as fast as it is.
    env = {"LOSSYCOLL_PACE": str(PACE), "LOSSYCOLL_LINK": "udp", **harness.EXACT}
    with harness.Ranks(interrupted, 2, env) as ranks:
        outcomes = ranks.collect(90)
    for outcome in outcomes:
        assert outcome.code == 0, outcome
        assert outcome.value["sum"] == [3.0], outcome
        assert outcome.value["after"] == 1.0
    assert outcomes[0].value["caught"], "it was to be interrupted"
    assert outcomes[0].value["early"] != [3.0], "it was to be in the middle of the call"
    assert not outcomes[1].value["caught"]


class Preempted(Exception):
    """What a job's own handler may raise."""


def preempt(*_: object) -> None:
    raise Preempted


def interrupted_repeat(rank: int, world: int) -> dict[str, Any]:
    """A handler raises while rank 0 waits for a call that is like the ones before it."""
    harness.init()
    signal.signal(signal.SIGALRM, preempt)
    repeats, submitted = dist.group.WORLD._endpoint.operations, []
    submit_again = repeats.submit_again
    repeats.submit_again = lambda *call: submitted.append(submit_again(*call)) or submitted[-1]
    caught, sums = [], []
    for kind in (None, signal.SIGALRM, signal.SIGINT):
        value = torch.full((1_000,), float(rank + 1))
        dist.barrier()
        if kind is not None and rank == 0:
            threading.Timer(0.05, os.kill, (os.getpid(), kind)).start()
        elif kind is not None:
            harness.await_ranks(f"caught {kind}", [0])
        try:
            dist.all_reduce(value)
        except (Preempted, KeyboardInterrupt) as error:
            caught.append(type(error).__name__)
            _get_default_store().set(f"caught {kind}/0", "")
        until(lambda value=value: value[0].item() == 3.0, "the sum is there", seconds=60)  # type: ignore[misc]
        sums.append(value.unique().tolist())
    dist.barrier()
    dist.destroy_process_group()
    return {"caught": caught, "sums": sums, "again": len(submitted)}


def test_what_a_handler_raises_during_a_repeated_call_is_the_callers_alone() -> None:
    first, second = harness.run_good(interrupted_repeat, 2, harness.EXACT)
    assert first["caught"] == ["Preempted", "KeyboardInterrupt"]
    assert not second["caught"]
    for found in (first, second):
        assert found["again"] == 2
        assert found["sums"] == [[3.0]] * 3


def endpoint(network: Network, rank: int) -> Endpoint:
    health = Health(
        rank,
        network.world,
        addresses=["127.0.0.1"] * network.world,
        liveness=10.0,
        control=None,
        on_failure=lambda error: None,
    )
    topology = Topology.flat(network.world)
    parts = GroupContext(health, network.options, 3, network.engines[rank], None, topology)
    return Endpoint(parts, timeout=60.0)


def add(mine: Endpoint, values: np.ndarray, *, future: bool) -> Operation:
    call = Collective("all_reduce", "float32", len(values))
    mine.health.issue(call)
    call_options = CallOptions(mine.options, mean=True, keep=values, future=future)
    return mine.all_reduce(call, values.ctypes.data, len(values), DType.F32, call_options)


@pytest.mark.parametrize("future", [False, True])
def test_an_interrupt_as_the_engine_takes_a_call(
    monkeypatch: pytest.MonkeyPatch, future: bool
) -> None:
    """Signals are heeded as C returns, before anybody could note what it did."""
    with Network(2) as network:
        ranks = [endpoint(network, rank) for rank in range(2)]
        first = [np.ones(1000, np.float32) for _ in ranks]
        begun = [add(mine, v, future=True) for mine, v in zip(ranks, first, strict=True)]
        for mine, operation in zip(ranks, begun, strict=True):
            mine.watcher.complete(operation)  # starts its watcher
            operation.wait()

        use = type(network.engines[0]._use)
        leave = use.__exit__

        def interrupt(self: Any, *exc: object) -> None:
            leave(self, *exc)
            if threading.current_thread() is threading.main_thread() and not exc[0]:
                raise KeyboardInterrupt

        values = np.full(1000, 2, np.float32)
        kept = weakref.ref(values)
        with monkeypatch.context() as patched:
            patched.setattr(use, "__exit__", interrupt)
            with pytest.raises(KeyboardInterrupt):
                add(ranks[0], values, future=future)
        del values
        gc.collect()
        assert kept() is not None, "the engine's memory was freed"
        theirs = np.full(1000, 4, np.float32)
        add(ranks[1], theirs, future=False).wait()
        np.testing.assert_array_equal(theirs, 3)
        # The group goes on, with the same numbers on both ranks.
        last = [np.full(1000, rank, np.float32) for rank in range(2)]
        again = [add(mine, v, future=True) for mine, v in zip(ranks, last, strict=True)]
        for operation, got in zip(again, last, strict=True):
            operation.wait()
            np.testing.assert_array_equal(got, 0.5)
        end = time.monotonic() + 60
        while kept() is not None and time.monotonic() < end:
            for operation in list(ranks[0].operations.unfinished.values()):
                operation.poll()
            gc.collect()
        assert kept() is None
        ended = threading.Thread(target=ranks[0].close, daemon=True)
        ended.start()
        ended.join(30)
        assert not ended.is_alive(), "close() hangs"
        ranks[1].close()
