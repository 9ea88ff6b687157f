"""Blocks through the backend: what is lost stays stale or is reported, what is needed comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.backend import process_group
from tests.support.failure_cases import CALM, catch
from tests.support.harness import init, run_good

LOSSY = {**CALM, "LOSSYCOLL_INJECT": "loss=0.3,seed=4", "LOSSYCOLL_MTU": "1500"}
CHUNK = 20_000
ROUNDS = 12


def rank_rounds(rank: int, world: int) -> dict[str, Any]:
    """Gathers a number that grows each round; what is missing must be a round older."""
    init()
    group = process_group.of(None)
    blocks = group.blocks(CHUNK * 4)
    per_packet = next(n for n in range(1, CHUNK) if group.blocks(4 * n + 4) == 2)
    output = torch.zeros(world * CHUNK)
    rows = output.view(world, CHUNK)
    seen = np.zeros((world, blocks), int)
    missed = needed_total = 0
    for number in range(1, ROUNDS + 1):
        rows[rank] = float(number)
        stale = seen < number - 1
        work = group.all_gather_blocks(output, stale if number % 2 else None)
        work.wait()
        arrived = work.arrived
        assert arrived.shape == (world, blocks)
        assert arrived[rank].all()
        if number % 2:
            assert arrived[stale].all(), "a needed block did not come"
            needed_total += int(stale.sum())
        seen[arrived] = number
        missed += int((~arrived).sum())
        for owner in range(world):
            wanted = np.repeat(seen[owner], per_packet)[:CHUNK]
            assert np.array_equal(rows[owner].numpy(), wanted), (number, owner)
    with lossycoll.reliable():
        work = group.all_gather_blocks(output)
        assert work.arrived.all()
    assert (output == ROUNDS).all()
    empty = group.all_gather_blocks(torch.zeros(0))
    assert empty.arrived.shape == (world, 0)
    dist.barrier()
    wrong = {
        "shape": catch(lambda: group.all_gather_blocks(torch.zeros(2, world))),
        "uneven": catch(lambda: group.all_gather_blocks(torch.zeros(world + 1))),
        "stride": catch(lambda: group.all_gather_blocks(torch.zeros(4 * world)[::2])),
        "needed": catch(
            lambda: group.all_gather_blocks(output, np.ones((world, blocks + 1), np.bool_))
        ),
    }
    dist.all_reduce(torch.ones(1))  # none of these took part in the count of calls
    dist.destroy_process_group()
    return {"missed": missed, "needed": needed_total, "wrong": wrong}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_stale_blocks_stay_until_they_are_needed(world: int) -> None:
    for found in run_good(rank_rounds, world, LOSSY):
        if world > 1:
            assert found["missed"] > 0, "the fault did not happen"
            assert found["needed"] > 0
        for name, caught in found["wrong"].items():
            if world == 1 and name == "uneven":
                continue  # any length is a multiple of one
            assert caught.kind == "UnsupportedError", name
            assert "wanted" in caught.text


def rank_result(rank: int, world: int) -> dict[str, Any]:
    """Nothing of rank 0 reaches rank 1, which asks for it until its deadline."""
    init()
    group = process_group.of(None)
    output = torch.full((world * CHUNK,), float(rank + 1))
    needed = np.ones((world, group.blocks(CHUNK * 4)), np.bool_)
    work = group.all_gather_blocks(output, needed)
    came = work.arrived_result
    is_done = work.is_completed()
    row = output[(1 - rank) * CHUNK :][:CHUNK]
    found = {
        "came": bool(came.all()),
        "is_done": is_done,
        "values": row.unique().tolist(),
        "same": bool((work.arrived == came).all()),
    }
    dist.destroy_process_group()
    return found


def test_a_result_can_be_read_while_peers_still_ask_for_what_was_sent() -> None:
    env = {
        **CALM,
        "LOSSYCOLL_INJECT": "link=0-1:1",
        "LOSSYCOLL_DEADLINE_MIN": "0.2",
        "LOSSYCOLL_DEADLINE_MAX": "2",
    }
    sender, receiver = run_good(rank_result, 2, env)
    assert sender == {"came": True, "is_done": False, "values": [2.0], "same": True}
    assert not receiver["came"], "the fault did not happen"
    assert receiver["values"] == [2.0]


def rank_contributions(rank: int, world: int) -> dict[str, Any]:
    """What is lost is sent again with the next contribution, until all of it has come."""
    init()
    group = process_group.of(None)
    blocks = group.blocks(CHUNK * 4)
    per_packet = next(n for n in range(1, CHUNK) if group.blocks(4 * n + 4) == 2)
    left = torch.arange(float(world * CHUNK)) % 97
    left += rank
    whole, total = left.clone(), torch.zeros(CHUNK)
    rounds = lost = 0
    while rounds < 60:
        part = torch.empty(CHUNK)
        work = group.reduce_scatter_blocks(part, left)
        work.wait()
        total += part * world
        assert work.lost.shape == (world, blocks)
        assert not work.lost[rank].any()
        keep = torch.from_numpy(np.repeat(work.lost, per_packet, axis=1)[:, :CHUNK].copy())
        left = left * keep.flatten()
        lost += int(work.lost.sum())
        rounds += 1
    assert not left.any()
    with lossycoll.reliable():
        exact = torch.empty(CHUNK)
        assert not group.reduce_scatter_blocks(exact, whole).lost.any()
    torch.testing.assert_close(total, exact * world)
    assert group.reduce_scatter_blocks(torch.zeros(0), torch.zeros(0)).lost.shape == (world, 0)
    wrong = {
        "chunk": catch(lambda: group.reduce_scatter_blocks(torch.zeros(3), whole)),
        "integers": catch(
            lambda: group.reduce_scatter_blocks(torch.zeros(1).int(), torch.zeros(world).int())
        ),
        "stride": catch(
            lambda: group.reduce_scatter_blocks(torch.zeros(8)[::2], whole[: 4 * world])
        ),
    }
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return {"lost": lost, "wrong": wrong}


@pytest.mark.parametrize("world", [1, 3])
def test_nothing_is_lost_for_good_of_what_is_sent_again(world: int) -> None:
    for found in run_good(rank_contributions, world, LOSSY):
        assert (found["lost"] > 0) == (world > 1), "the fault did not happen"
        for name, caught in found["wrong"].items():
            assert caught.kind == "UnsupportedError", name


def rank_dead_link(rank: int, world: int) -> list[list[bool]]:
    init()
    group = process_group.of(None)
    output = torch.zeros(world * CHUNK)
    needed = np.ones((world, group.blocks(CHUNK * 4)), np.bool_)
    arrived = group.all_gather_blocks(output, needed).arrived
    dist.destroy_process_group()
    return [[bool(row.all()), bool(row.any())] for row in arrived]


def test_a_dead_link_ends_after_the_deadline() -> None:
    env = {
        **CALM,
        "LOSSYCOLL_INJECT": "link=0-1:1",
        "LOSSYCOLL_DEADLINE_MIN": "0.2",
        "LOSSYCOLL_DEADLINE_MAX": "0.5",
    }
    everything, nothing = [True, True], [False, False]
    found = run_good(rank_dead_link, 3, env)
    assert found[0] == [everything] * 3
    assert found[1] == [nothing, everything, everything]
    assert found[2] == [everything] * 3
