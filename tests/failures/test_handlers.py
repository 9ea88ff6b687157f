"""A group is ended while one of its calls waits: by a signal's handler, or by another thread."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.failure_cases import CALM, catch
from tests.support.harness import Ranks, init, note, run_good

TIMEOUT = 60.0
"""Seconds: of every call, where nothing else ends it."""
PROMPT = TIMEOUT / 3
"""What ends within it, on a starved machine as well, has waited for no timeout."""


KINDS = ("collective", "message")


def calls(group: Any) -> dict[str, Callable[[], Any]]:
    """Calls that the other rank doesn't make, by their kind.

    Methods of the group: torch's functions look for it after an error, and hide that by another.
    """
    import torch

    many = torch.ones(100_000)
    return {
        "collective": lambda: group.allreduce(many),
        "message": lambda: group.recv([many], 1, 0),
    }


def ends(group: Any, how: str) -> None:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _abort_process_group

    dist.destroy_process_group(group) if how == "destroy" else _abort_process_group(group)


def rank_ended_in_a_call(rank: int, world: int) -> list[tuple[str, str, float, float]]:
    """Of each way: its name, the error of the call, and how long ending the group and the call
    took."""
    import torch.distributed as dist

    init(timeout=TIMEOUT)
    seen = []
    for by, how, kind in [
        ("handler", "destroy", "collective"),
        ("thread", "destroy", "message"),
        *[("handler", "abort", kind) for kind in KINDS],
        *[("thread", "abort", kind) for kind in KINDS],
    ]:
        group: Any = dist.new_group()
        dist.barrier(group)
        began: list[float] = []
        took: list[float] = []

        def end(*_: object) -> None:
            began.append(time.monotonic())  # noqa: B023 (called before the loop goes on)
            ends(group, how)  # noqa: B023
            took.append(time.monotonic() - began[0])  # noqa: B023

        if rank == 0:
            signal.signal(signal.SIGUSR1, end)
            work = calls(group)[kind]()

            def soon() -> None:
                time.sleep(0.1)
                if by == "handler":  # noqa: B023
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                else:
                    end()

            ender = threading.Thread(target=soon)
            ender.start()
            caught = catch(work.wait)
            ender.join()
            seen.append((f"{by} {how} {kind}", caught.kind, took[0], caught.when - began[0]))
        dist.barrier()
        if rank == 1:
            dist.destroy_process_group(group)
    dist.destroy_process_group()
    return seen


def test_a_group_can_be_ended_in_a_handler_or_a_thread_while_a_call_waits() -> None:
    seen, _ = run_good(rank_ended_in_a_call, 2, CALM)
    assert len(seen) == 6
    for name, error, ending, call in seen:
        assert error == ("AbortedError" if "abort" in name else "ClosedError"), (name, error)
        assert max(ending, call) < PROMPT, (name, ending, call)
    took = {name: ending for name, _, ending, _ in seen}
    # In a handler nothing is left to wait for, but the frame below it.
    assert took["handler destroy collective"] < 0.5 * took["thread destroy message"], took


def rank_ended_by_a_signal(rank: int, world: int) -> None:
    """Its handler ends the job's group or makes a call, and then the process."""
    import torch
    import torch.distributed as dist

    init(timeout=TIMEOUT)
    how = os.environ["HANDLER"]

    def end(*_: object) -> None:
        dist.destroy_process_group() if how == "destroy" else dist.all_reduce(torch.ones(1))
        sys.exit(143)

    signal.signal(signal.SIGTERM, end)
    dist.barrier()
    if how == "call as one is submitted" and rank == 0:
        group: Any = dist.group.WORLD
        engine = group._endpoint.operations._engine
        submit = engine.submit

        def interrupted(*given: Any) -> None:
            signal.raise_signal(signal.SIGTERM)
            submit(*given)

        engine.submit = interrupted
    note("calls")
    while how != "destroy" or rank == 0:
        dist.all_reduce(torch.ones(100_000))
    time.sleep(TIMEOUT)


@pytest.mark.parametrize("how", ["destroy", "call", "call as one is submitted"])
def test_a_signals_handler_ends_the_process_or_makes_a_call(how: str) -> None:
    """A call in it takes its turn among those of the other rank, whatever they are."""
    with Ranks(rank_ended_by_a_signal, 2, {**CALM, "HANDLER": how}) as ranks:
        for rank in range(2):
            ranks.wait_for(rank, "calls")
        if how == "destroy":
            ranks.wait_until_still(0)
        if how != "call as one is submitted":
            for rank in range(2):
                begin = ranks.signal(rank, signal.SIGTERM)
        else:
            begin = time.monotonic()
        outcomes = ranks.collect(2 * TIMEOUT)
        took = time.monotonic() - begin
    assert took < (PROMPT if how == "destroy" else TIMEOUT), outcomes
    errors = {"PeerLostError", "AbortedError", "MismatchError", "EngineError"}
    for outcome in outcomes:
        if how == "destroy":
            assert (outcome.error, outcome.text) == ("SystemExit", "143"), str(outcome)
        assert outcome.error in {"SystemExit", *errors}, str(outcome)
        assert outcome.code == 1, str(outcome)
    if how == "call as one is submitted":
        assert "a signal's handler makes it on top of a call" in outcomes[0].text, outcomes[0]
