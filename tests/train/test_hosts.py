"""Training methods where ranks share hosts, and nothing is lost: as on ranks without hosts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lossycoll
from tests.support import harness
from tests.support.failure_cases import CALM
from tests.support.harness import run_good
from tests.support.host_training import HIDDEN, drifting, shown
from tests.support.sharded_cases import batch, check_equal, loss_of, network, sharded, share
from tests.support.sharded_scripts import train

WORLD = 4


def steps_of_one_process(rank: int, group: Any) -> torch.Tensor:
    """ShardedOptimizer's, beside those of one process that has all data."""
    model, plain = network(HIDDEN), network(HIDDEN)
    mine = sharded(model.parameters(), torch.optim.AdamW, group, lr=0.01)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(mine, theirs, model, plain, rank, WORLD)
    check_equal(model, plain)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def compressed(rank: int, group: Any) -> list[float]:
    """The losses of steps by ARC-Top-K, after which replicas are equal."""
    model = DistributedDataParallel(network(HIDDEN), process_group=group)
    state = lossycoll.ARCTopKState(start_iter=1, ratio=0.2)
    model.register_comm_hook(state, lossycoll.arc_topk_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, share(batch(step % 2, WORLD), rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    rows = shown(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert bool((rows == rows[0]).all())
    return losses


def rank_that_trains(rank: int, world: int) -> dict[str, Any]:
    harness.init()
    flat = dist.new_group(pg_options={"link": "udp"})
    out: dict[str, Any] = {"topologies": [lossycoll.topology(g).hosts for g in (None, flat)]}
    by_hosts, alone = (drifting(rank, world, group) for group in (None, flat))
    out["drift"] = torch.equal(by_hosts, alone)
    by_hosts, alone = (steps_of_one_process(rank, group) for group in (None, flat))
    rows = shown(by_hosts)
    torch.testing.assert_close(by_hosts, alone)
    out["sharded"] = bool((rows == rows[0]).all())
    out["compressed"] = [compressed(rank, group) for group in (None, flat)]
    out["missing"] = [lossycoll.stats(group).packets_missing for group in (None, flat)]
    dist.destroy_process_group()
    return out


def test_replicas_of_two_hosts_end_as_those_of_a_flat_group() -> None:
    """DriftBound, which copies, to the bit; sums within rounding, and equal on all ranks."""
    hosts = {rank: {"LOSSYCOLL_HOST": "ab"[rank // 2]} for rank in range(WORLD)}
    for found in run_good(rank_that_trains, WORLD, CALM, per_rank=hosts, timeout=100):
        assert found["topologies"] == [(0, 0, 1, 1), (0, 1, 2, 3)]
        assert found["missing"] == [0, 0]
        assert found["drift"]
        assert found["sharded"]
        for losses in found["compressed"]:
            assert sum(losses[-2:]) < sum(losses[:2])
