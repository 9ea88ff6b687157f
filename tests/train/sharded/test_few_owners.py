"""Few owners of short buckets, where parity alone makes up for loss.

Steps and checkpoints are those of one process; what is lost with error feedback comes later.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.runtime.engine.packet_masks import existing, overlapping
from lossycoll.train.common.collectives import Collectives
from tests.support.harness import init, run_good
from tests.support.sharded_cases import (
    batch,
    check_equal,
    check_state,
    network,
    replicas,
    sharded,
)
from tests.support.sharded_scripts import ENV, train

ALONE = {"LOSSYCOLL_MAX_MISSING": "0.01", "LOSSYCOLL_REPAIR": "0"}


def counts_of(optimizer: Any) -> list[list[int]]:
    return [list(shard.bucket.counts) for shard in optimizer._store.shards]


def rank_trains(rank: int, world: int) -> dict[str, Any]:
    os.environ["LOSSYCOLL_HOST"] = str(rank)
    init()
    model, plain = network(), network()
    mine = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, max_missing=0.01)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(
        *(mine, theirs, model, plain, rank, world),
        each=lambda optimizer, net: (
            optimizer.clip_grad_norm_(0.1)
            if optimizer is mine
            else torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        ),
    )
    check_equal(model, plain)
    counts = counts_of(mine)
    mine.consolidate_state_dict(to=0)
    if rank == 0:
        check_state(mine.state_dict(), theirs.state_dict())
    saved: list[Any] = [mine.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(saved)
    # By other owners: all of them, since nothing says that parity is all there is.
    with lossycoll.lossy(repair=1):
        other = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, repair=1)
    other.load_state_dict(saved[0])
    train(other, theirs, model, plain, rank, world, first=10)
    check_equal(model, plain)
    dist.destroy_process_group()
    return {"counts": counts, "others": counts_of(other)}


@pytest.mark.parametrize("world", [2, 3])
def test_a_step_is_that_of_one_process_whoever_owns_buckets(world: int) -> None:
    for found in run_good(rank_trains, world, {**ENV, "LOSSYCOLL_LINK": "udp"}, timeout=200):
        owners = [[rank for rank, count in enumerate(each) if count] for each in found["counts"]]
        assert owners == [[number % world] for number in range(len(owners))], found["counts"]
        assert len(owners) > world
        assert all(all(each) for each in found["others"])


def rank_loses(rank: int, world: int) -> dict[str, Any]:
    os.environ["LOSSYCOLL_HOST"] = str(rank)
    init()
    model = network(200)
    # The environment says what may be missing. "auto" bounds no age there.
    age = {"auto": "auto", "0": 0}[os.environ["AGE"]]
    mine = sharded(model.parameters(), torch.optim.SGD, lr=0.1, repair=None, max_age=age)
    for step in range(30):
        mine.zero_grad()
        inputs, targets = batch(1000 * rank + step, 1)
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        mine.step()
    ages, stats = mine.ages(), mine.stats()
    mine.synchronize_parameters()
    rows = replicas(model)
    dist.destroy_process_group()
    return {
        "ages": ages,
        "blocks": stats.blocks,
        "stale": stats.stale,
        "repaired": stats.repaired,
        "equal": bool((rows == rows[0]).all()),
        "counts": counts_of(mine),
        "block": mine._collectives.lossy.block_bytes,  # type: ignore[union-attr]
    }


@pytest.mark.parametrize("age", ["auto", "0"])
def test_lost_blocks_of_few_owners_are_counted_once(age: str) -> None:
    loss = {"LOSSYCOLL_INJECT": "loss=0.5,burst=8,seed=3", "LOSSYCOLL_MTU": "1500"}
    env = {**ENV, **ALONE, **loss, "AGE": age}
    world = 3
    found = run_good(rank_loses, world, env, timeout=200)
    for rank, one in enumerate(found):
        blocks = [[-(-4 * count // one["block"]) for count in each] for each in one["counts"]]
        assert all(sum(bool(count) for count in each) == 1 for each in one["counts"])
        of_others = sum(sum(each) - each[rank] for each in blocks)
        assert one["blocks"] == 30 * of_others
        assert sum(one["ages"]) == of_others
        assert one["equal"]
        assert one["repaired"] == (one["blocks"] if age == "0" else 0)
    assert (sum(one["stale"] for one in found) > 0) == (age == "auto"), "the fault did not happen"


def rank_feeds_back(rank: int, world: int) -> dict[str, Any]:
    """Reports of loss, where packets are smaller than blocks are elsewhere."""
    os.environ["LOSSYCOLL_HOST"] = str(rank)
    init()
    found = Collectives(None)
    chunk, lost = 5_000, 0
    left = torch.arange(float(world * chunk)) % 97 + rank
    whole, total = left.clone(), torch.zeros(chunk)
    sizes = set()
    for _ in range(60):
        part = torch.empty(chunk)
        report = found.reduce_scatter_reported(part, left)
        missed = report.missed
        sizes.add(report._work.block_bytes)  # type: ignore[attr-defined]
        total += part * world
        left = torch.zeros_like(left) if missed is None else missed
        lost += int(torch.count_nonzero(left))
    assert not left.any()
    with lossycoll.reliable():
        exact = torch.empty(chunk)
        dist.reduce_scatter_single(exact, whole)
    torch.testing.assert_close(total, exact)
    dist.destroy_process_group()
    return {"lost": lost, "sizes": sizes, "block": found.lossy.block_bytes}  # type: ignore[union-attr]


def test_all_that_is_reported_lost_comes_later_also_in_smaller_packets() -> None:
    env = {**ENV, **ALONE, "LOSSYCOLL_INJECT": "loss=0.4,burst=8,seed=3", "LOSSYCOLL_MTU": "1500"}
    for found in run_good(rank_feeds_back, 3, env, timeout=200):
        assert found["lost"] > 0, "the fault did not happen"
        (size,) = found["sizes"]
        assert size < found["block"]


def test_pieces_overlap_as_their_elements_do() -> None:
    draw = np.random.default_rng(1)
    for _ in range(300):
        length, each, size = draw.integers(1, 200), draw.integers(1, 60), draw.integers(1, 60)
        marks = draw.random(-(-length // each)) < 0.3
        elements = np.repeat(marks, each)[:length]
        wanted = [elements[at : at + size].any() for at in range(0, length, size)]
        assert overlapping(marks, each, size, length).tolist() == wanted
    assert existing([5, 0, 11], 5).tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert overlapping(np.zeros(0, np.bool_), 4, 4, 0).tolist() == []
