"""A rank of ShardedOptimizer that is killed: the others have its shard's state, and go on."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

import lossycoll
from lossycoll.errors import PeerLostError
from tests.support.harness import Ranks
from tests.support.sharded_cases import SMALL, batch, loss_of, network, share
from tests.train.elastic.test_world import job_store

SEATS = 3
KILLED = 2
BEFORE = 20
LAST = 60
EVERY = 15
"""One copy has been made, of the first step, and another is made in the meantime."""


def moments(optimizer: Any) -> float:
    """The norm of all ranks' second moments."""
    optimizer.consolidate_state_dict(to=0)
    if torch.distributed.get_rank():
        return 0.0
    states = optimizer.state_dict()["state"].values()
    return float(torch.cat([state["exp_avg_sq"].flatten() for state in states]).norm())


def job(slot: int, slots: int) -> dict[str, Any]:
    store, again = job_store(), "AGAIN" in os.environ
    if again:
        store.wait(["died"])
    world = lossycoll.ElasticWorld(store, slot, slots, timeout=60.0, grace=10.0)
    model = network()
    step, backup = 0, None
    changes: list[Any] = []
    found: list[float] = []

    while step < LAST or len(world.slots) < slots:
        try:
            step = world.share(model)
            optimizer = lossycoll.ShardedOptimizer(
                model.parameters(), torch.optim.AdamW, lr=1e-3, bucket_bytes=SMALL
            )
            if optimizer.restore_shards(backup):
                found.append(moments(optimizer))
            backup = lossycoll.ShardBackup(optimizer, every=EVERY)
            while step < LAST or len(world.slots) < slots:
                if step == BEFORE and slot == KILLED and not again:
                    store.set("died", "")
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                loss_of(model, share(batch(step, slots), slot)).backward()
                optimizer.step()
                backup.step()
                if step == BEFORE - 1:
                    found.append(moments(optimizer))
                step += 1
                change = world.boundary(step)
                if change:
                    changes.append(change)
                    break
        except PeerLostError as error:
            changes.append(world.recover(error, step))
    optimizer.synchronize_parameters()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    world.close()
    return {"changes": changes, "moments": found, "weights": weights, "steps": step}


def test_a_killed_rank_costs_no_state() -> None:
    env = {"LOSSYCOLL_LIVENESS": "5"}
    order = [*range(SEATS), KILLED]
    with Ranks(job, SEATS, env, ranks=order, per_rank={SEATS: {"AGAIN": "1"}}) as ranks:
        outcomes = ranks.collect(90.0)
    assert outcomes[KILLED].code == -signal.SIGKILL, str(outcomes[KILLED])
    good = [outcome for n, outcome in enumerate(outcomes) if n != KILLED]
    assert not [one for one in good if one.error], "\n".join(map(str, good))
    first = good[0].value
    assert first["changes"][0].lost == (KILLED,)
    assert first["changes"][-1].slots == tuple(range(SEATS))
    before, without, *_ = first["moments"]
    # All but what a third of the parameters has learnt since the copy was made. Without it a third
    # of the squares would be missing.
    assert 0.9 * before < without < 1.1 * before
    for one in good[1:]:
        for mine, theirs in zip(first["weights"], one.value["weights"], strict=True):
            assert torch.equal(mine, theirs)
