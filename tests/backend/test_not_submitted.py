"""What keeps one rank from submitting a call reaches all ranks, or leaves no trace."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.backend import sparse, tensors
from lossycoll.plan import registry
from lossycoll.runtime.core.call import Collective
from lossycoll.runtime.world.group_state import Health
from tests.support.harness import EXACT, init, run_good

QUIET = {"LOSSYCOLL_LOG": "off", **EXACT}
LATE = 2.0
"""Seconds; longer than it takes until a waiting rank compares calls with the others."""


def once(function: Any, error: BaseException, *, skip: int = 0) -> Callable[..., Any]:
    """``function``, one of whose calls raises ``error``: the one after ``skip`` others."""
    left = [skip + 1]

    def run(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error
        return function(*args, **kwargs)

    return run


def failing(name: str, error: BaseException) -> dict[str, str]:
    """Registers an all-reduce that raises ``error`` the first time it is planned."""
    base = registry.choose_algorithm("all_reduce", "transpose", 4)
    build = once(base.build, error)

    def built(*args: Any, **kwargs: Any) -> Any:
        return build(*args, **kwargs)

    registry.register(dataclasses.replace(base, name=name, default=False, build=built))
    return {"algorithm": name}


def said(call: Callable[[], object]) -> tuple[str, str, float]:
    """The type and text of the error that a call raises, and the seconds until then."""
    begin = time.monotonic()
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "", time.monotonic() - begin


def rank_interrupted(rank: int, world: int, where: str) -> list[float]:
    stops = KeyboardInterrupt() if rank == 1 else None
    options = {}
    if where == "builder":
        base = registry.choose_algorithm("all_reduce", "transpose", 4)
        options = failing("stops", KeyboardInterrupt()) if stops else {"algorithm": "stops"}
        if not stops:
            registry.register(dataclasses.replace(base, name="stops", default=False))
    init(timeout=20, pg_options=options)
    if where == "staging" and stops:
        tensors.contiguous = once(tensors.contiguous, stops)
    value = torch.full((8,), float(rank + 1))
    try:
        dist.all_reduce(value)
        assert not stops, "it was to be interrupted"
    except KeyboardInterrupt:
        dist.all_reduce(value)
    if rank == 1:
        time.sleep(LATE)
    copy = torch.full((4,), float(rank + 5))
    dist.broadcast(copy, 0)  # ranks whose numbers differ take this for another call
    other = torch.full((8,), float(rank))
    dist.all_reduce(other)
    dist.destroy_process_group()
    return [value[0].item(), copy[0].item(), other[0].item()]


def rank_interrupted_in_staging(rank: int, world: int) -> list[float]:
    return rank_interrupted(rank, world, "staging")


def rank_interrupted_in_builder(rank: int, world: int) -> list[float]:
    return rank_interrupted(rank, world, "builder")


@pytest.mark.parametrize("run", [rank_interrupted_in_staging, rank_interrupted_in_builder])
def test_a_call_interrupted_before_it_was_submitted_is_made_again(run: Any) -> None:
    assert run_good(run, 2, QUIET) == [[3.0, 5.0, 1.0]] * 2


def rank_builder_raises(rank: int, world: int) -> Any:
    options = failing("bad", KeyError("no such table") if rank == 1 else ValueError("unused"))
    if rank == 0:
        with pytest.raises(ValueError, match="unused"):
            registry.choose_algorithm("all_reduce", "bad", 4).build(2, 0, 8, 100)
    init(timeout=30, pg_options=options)
    out = [said(lambda: dist.all_reduce(torch.ones(8)))]
    with lossycoll.lossy(algorithm="auto"):
        return [*out, said(lambda: dist.all_reduce(torch.ones(8)))]


def rank_staging_raises(rank: int, world: int) -> Any:
    init(timeout=30)
    if rank == 1:
        tensors.contiguous = once(tensors.contiguous, RuntimeError("no such table"))
    return [said(lambda: dist.all_reduce(torch.ones(8))) for _ in range(2)]


@pytest.mark.parametrize("run", [rank_builder_raises, rank_staging_raises])
def test_a_builder_that_raises_is_heard_by_all(run: Any) -> None:
    for rank, calls in enumerate(run_good(run, 2, {**QUIET, "LOSSYCOLL_LIVENESS": "5"})):
        for kind, text, seconds in calls:
            assert kind == ("AbortedError", "EngineError")[rank], text
            assert "rank 1/2: call #0 all_reduce" in text
            assert "no such table" in text
            assert seconds < 10


class Torch:
    """torch, whose ``cat`` raises."""

    def __init__(self, error: BaseException) -> None:
        self.cat = once(torch.cat, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def rank_sparse(rank: int, world: int, spoil: Callable[[], None]) -> Any:
    """The second sum is spoilt at rank 1."""
    init(timeout=30)
    values = [torch.tensor([float(10**i), 0, 0]).to_sparse() for i in range(2)]
    out = []
    for i, value in enumerate(values):
        if i == 1 and rank == 1:
            spoil()
        out.append(said(lambda value=value: dist.all_reduce(value)))  # type: ignore[misc]
    assert out[0] == ("", "", out[0][2]), "the sum before is not touched"
    assert values[0].to_dense()[0] == 2
    return [*out[1:], said(lambda: dist.all_reduce(torch.ones(8)))]


def rank_sparse_without_memory(rank: int, world: int) -> Any:
    def spoil() -> None:
        text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."
        sparse.torch = Torch(RuntimeError(text))  # type: ignore[assignment]

    return rank_sparse(rank, world, spoil)


def test_a_sparse_sum_without_memory_is_heard_by_all() -> None:
    outcomes = run_good(rank_sparse_without_memory, 2, QUIET)
    for rank, calls in enumerate(outcomes):
        for kind, text, _ in calls:
            assert kind == ("AbortedError", "EngineError")[rank], text
            assert "no memory for it" in text


def rank_sparse_interrupted(rank: int, world: int) -> Any:
    gather = sparse._gather

    def interrupted(*arguments: Any) -> Any:
        sparse._gather = gather
        gather(*arguments)
        raise KeyboardInterrupt

    def spoil() -> None:
        sparse._gather = interrupted

    return rank_sparse(rank, world, spoil)


@pytest.mark.parametrize("inject", ["", "seed=3,link=1-0:0.9"], ids=["at once", "resent"])
def test_a_sparse_sum_interrupted_halfway_ends_the_group(inject: str) -> None:
    """And the sum before it ends well, also where the other rank still lacks its data."""
    env = {**QUIET, "LOSSYCOLL_INJECT": inject}
    (first, again), (own, after) = run_good(rank_sparse_interrupted, 2, env)
    assert own[0] == "KeyboardInterrupt"
    for kind, text, _ in (first, again, after):
        assert kind == "AbortedError"
        assert "call #1 all_reduce torch.float32[3] of 1 sparse dimensions" in text or (
            "was interrupted halfway" in text
        )


def test_only_the_last_number_is_taken_back() -> None:
    health = Health(
        0, 2, addresses=["", ""], liveness=1.0, control=None, on_failure=lambda error: None
    )
    calls = [Collective(name) for name in ("first", "second")]
    for call in calls:
        health.issue(call)
    assert not health.take_back(calls[0])
    assert health.take_back(calls[1])
    assert (health.seq, calls[1].seq, health.call_at(1)) == (0, -1, None)
    health.issue(calls[1])
    assert health.call_at(1) == "second"
