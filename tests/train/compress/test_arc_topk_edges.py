"""ARC-Top-K among real ranks: narrow types, other orders of memory, steps that come to nothing."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lossycoll
from tests.support import harness
from tests.support.harness import Ranks, run_good
from tests.train.compress.test_arc_topk_ranks import LOSSY, WORLD, made, rows, same


def narrow(rank: int, rule: str, dtype: torch.dtype, steps: int = 40) -> int:
    """``all`` stays the mean of ``own``, though gradients have 16 bits; bytes of a number."""
    state = made(error_feedback=rule, start_iter=0, dense_below=0, momentum=0.3)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        gradient = torch.randn(40, 30, generator=draw).to(dtype)
        state.mean_([gradient])
        assert gradient.dtype == dtype
        assert same(gradient)
    memory = state.state_dict()["memories"]["0"]
    off = memory["all"].view(-1) - rows(memory["own"]).mean(0)
    assert float(off.abs().max()) < 1e-5
    sent = state.traffic()
    return int(sent["bytes"] - 4 * sent["sketch"]) // (sent["rows"] + sent["whole"])


def in_any_order_of_memory(rank: int) -> None:
    """Ranks choose the same rows of gradients whose memory has another order."""
    for rule in ("ef14", "ef21"):
        mine, plain = (made(start_iter=0, dense_below=0, error_feedback=rule) for _ in range(2))
        for step in range(4):
            draw = torch.Generator().manual_seed(10 * step + rank)
            gradient = torch.randn(30, 20, generator=draw)
            filters = torch.randn(8, 6, 3, 3, generator=draw)
            wanted = [gradient.clone(), filters.clone()]
            other, found = gradient.clone(), filters.clone()
            if (rank + step) % 2:
                other = gradient.t().contiguous().t()
                found = filters.to(memory_format=torch.channels_last)
            stride = other.stride()
            with lossycoll.reliable():
                plain.mean_(wanted)
                mine.mean_([other, found])
            assert other.stride() == stride
            torch.testing.assert_close([other, found], wanted, rtol=1e-5, atol=1e-6)
            assert same(other, found)


def overflow(rank: int) -> None:
    """What a rank has of float16 is near its end: neither the mean nor what waits is infinite."""
    for rule in ("ef14", "none"):
        state = made(start_iter=1, dense_below=0, error_feedback=rule, ratio=0.1)
        total, used = torch.zeros(20, 30), torch.zeros(20, 30)
        with lossycoll.reliable():
            for _ in range(25):
                gradients = [torch.full((20, 30), 5e4).half(), torch.full((7,), 6e4).half()]
                total += gradients[0].float()
                state.mean_(gradients)
                used += gradients[0].float()
                assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        if rule == "ef14":
            kept = total - state.state_dict()["memories"]["0"]["error"]
            torch.testing.assert_close(used.view(-1), rows(kept).mean(0), rtol=1e-3, atol=0)


def loud(rank: int) -> None:
    """NonFiniteError leaves the memory as it was, of what is beside it as well."""
    shapes = ((40, 30), (20, 30), (5,))
    for rule in ("ef14", "ef21", "ef21m"):
        state = made(start_iter=0, dense_below=0, error_feedback=rule, on_nonfinite="raise")
        for step in range(6):
            draw = torch.Generator().manual_seed(10 * step + rank)
            gradients = [torch.randn(shape, generator=draw) for shape in shapes]
            gradients.append(torch.randn(30, 40, generator=draw, dtype=torch.float64))
            if step < 3:
                state.mean_(gradients)
                continue
            if step == 5:  # the sum of all isn't finite, nothing else
                gradients[2].fill_(3e38)
            elif rank == 1:
                gradients[3][2, 2] = gradients[2][1] = float("nan")
            before = state.state_dict()
            scope = lossycoll.reliable() if step % 2 else contextlib.nullcontext()
            with scope, pytest.raises(lossycoll.NonFiniteError):
                state.mean_(gradients)
            after = state.state_dict()
            for part in ("memories", "owed"):
                torch.testing.assert_close(after[part], before[part], rtol=0, atol=0)


def discarded(rank: int) -> None:
    """With hold, a step whose gradients nobody uses can be undone."""
    for rule in ("ef14", "ef21m"):
        state, twin = (made(start_iter=0, dense_below=0, error_feedback=rule) for _ in range(2))
        state.hold()
        for step in range(6):
            draw = torch.Generator().manual_seed(10 * step + rank)
            gradients = [torch.randn(shape, generator=draw) for shape in ((40, 30), (24, 20))]
            gradients = gradients[: 2 - step // 5]  # at last it is of one of them
            others = [gradient.clone() for gradient in gradients]
            with lossycoll.reliable():
                state.mean_(gradients)
                if step % 3 == 2:
                    state.discard()
                    twin.iter += 1
                    continue
                twin.mean_(others)
            torch.testing.assert_close(gradients, others, rtol=1e-5, atol=1e-6)
            if step % 3 == 0:
                state.commit()
                state.discard()  # too late
        found, wanted = state.state_dict(), twin.state_dict()
        torch.testing.assert_close(found["memories"], wanted["memories"], rtol=1e-5, atol=1e-5)


def edges(rank: int, world: int) -> list[int]:
    del world
    in_any_order_of_memory(rank)
    overflow(rank)
    loud(rank)
    discarded(rank)
    types = (torch.bfloat16, torch.float16)
    found = [narrow(rank, rule, dtype) for rule in ("ef21", "ef21m") for dtype in types]
    dist.destroy_process_group()
    return found


def lossy(rank: int, world: int) -> list[int]:
    harness.init()
    return edges(rank, world)


def gloo(rank: int, world: int) -> list[int]:
    harness.init(backend="gloo")
    return edges(rank, world)


@pytest.mark.parametrize(("function", "size"), [(lossy, 2), (gloo, 4)])
def test_memories_hold_what_steps_have_taken(function: Any, size: int) -> None:
    for found in run_good(function, WORLD, LOSSY):
        assert found == [size] * 4, "bytes of a number of 16 bits under EF21"


def loses(rank: int, world: int) -> None:
    """Where nothing but a rank is lost."""
    harness.init()
    state = made(start_iter=0, error_feedback="ef21")

    def steps(count: int) -> None:
        for _ in range(count):
            state.mean_([torch.ones(40, 30)])
            time.sleep(0.02)

    steps(1)
    harness.die(1)
    # A gathering of means may be the first call that is made without it.
    with pytest.raises(lossycoll.PeerLostError, match=r"rank 1 .*lost"):
        steps(400)


@pytest.mark.parametrize("delivery", ["lossy", "reliable"])
def test_a_group_that_continues_without_a_rank_is_refused(delivery: str) -> None:
    env = {"LOSSYCOLL_ON_PEER_LOSS": "continue", "LOSSYCOLL_LIVENESS": "4", "LOSSYCOLL_LOG": "off"}
    with Ranks(loses, 3, {**env, "LOSSYCOLL_DELIVERY": delivery}) as ranks:
        outcomes = ranks.collect(90)
    assert [outcome.code for outcome in outcomes] == [0, -signal.SIGKILL, 0], outcomes
    assert not any(outcome.error for outcome in (outcomes[0], outcomes[2])), outcomes
