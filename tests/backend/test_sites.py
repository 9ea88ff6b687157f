"""Collectives of ranks at two sites, by tiers, through torch; between sites packets are lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import lossycoll
from tests.backend.test_block_collectives import LOSSY, rank_contributions, rank_rounds
from tests.support.failure_cases import CALM
from tests.support.harness import init, run_good

SITES = {rank: {"LOSSYCOLL_SITE": "xxyy"[rank]} for rank in range(4)}
COUNT = 60_000


def rank_collectives(rank: int, world: int) -> dict[str, Any]:
    init()
    own = torch.full((COUNT,), 2.0**rank)
    chunk, rows = torch.empty(COUNT // world), torch.empty(COUNT * world)
    with lossycoll.reliable():
        total = own.clone()
        dist.all_reduce(total)
        assert (total == 15).all()
        dist.reduce_scatter_single(chunk, own)
        assert (chunk == 15).all()
    dist.all_gather_single(rows, own)
    assert torch.equal(rows.view(world, COUNT)[:, 0], 2.0 ** torch.arange(world))
    copied = own.clone()
    dist.broadcast(copied, 3)
    assert (copied == 8).all()
    mean = own.clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    dist.reduce_scatter_single(chunk, own, dist.ReduceOp.AVG)
    dist.destroy_process_group()
    return {"means": np.unique(mean.numpy()), "chunk": np.unique(chunk.numpy())}


def test_collectives_go_by_sites() -> None:
    found = run_good(rank_collectives, 4, LOSSY, per_rank=SITES)
    of_site = {0: 1.5, 1: 1.5, 2: 6.0, 3: 6.0}
    for rank, one in enumerate(found):
        # Only whole sites are lost; and the mean, on the way back.
        assert set(one["means"]) <= {3.75, 1.5, 6.0, 2.0**rank}
        assert set(one["chunk"]) == {3.75, of_site[rank]}
    assert len({value for one in found for value in one["means"]}) > 2, "nothing was lost"


def test_blocks_that_are_needed_come_to_all_ranks_of_a_site() -> None:
    for found in run_good(rank_rounds, 4, LOSSY, per_rank=SITES):
        assert found["missed"] > 0, "the fault did not happen"
        assert found["needed"] > 0


def rank_collectives_within_a_host(rank: int, world: int) -> tuple[int, ...]:
    init()
    own = torch.full((COUNT,), 2.0**rank)
    for algorithm in ("auto", "transpose"):
        with lossycoll.lossy(algorithm=algorithm):
            total = own.clone()
            dist.all_reduce(total)
            assert (total == 2**world - 1).all()
            parts = torch.empty(COUNT)
            dist.all_to_all_single(parts, own)
            assert torch.equal(parts.view(world, -1)[:, 0], 2.0 ** torch.arange(world))
    found = lossycoll.topology().hosts
    dist.destroy_process_group()
    return found


def test_packets_of_a_network_fit_into_memory_that_is_shared() -> None:
    """Those of loopback may be larger."""
    for hosts in run_good(rank_collectives_within_a_host, 2, {**CALM, "LOSSYCOLL_MTU": "65535"}):
        assert hosts == (0, 0)


def test_what_is_lost_of_a_site_is_sent_again_by_who_holds_its_sum() -> None:
    for found in run_good(rank_contributions, 4, LOSSY, per_rank=SITES):
        assert found["lost"] > 0, "the fault did not happen"
