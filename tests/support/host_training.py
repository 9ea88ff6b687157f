"""What ranks train where some of them share a host: beside a flat group, and where packets between
hosts are lost (a script of the laboratory; says what came of it as JSON)."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lossycoll
from tests.support.sharded_cases import batch, flat, loss_of, network, replicas, sharded, share

HIDDEN = 100
BUCKET = 20_000
MAX_AGE = 2
STEPS = 12
SWEEPS, PERIOD = 4, 2
ELEMENTS = 40_000


def drifting(rank: int, world: int, group: Any = None) -> Tensor:
    """The parameters of a rank that learns from its own data alone, with DriftBound."""
    model = network(HIDDEN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lossycoll.DriftBound(model, optimizer, PERIOD, group=group) as bound:
        for step in range(3 * PERIOD):
            optimizer.zero_grad()
            loss_of(model, share(batch(step, world), rank)).backward()
            optimizer.step()
        bound.finish()
    return flat(model.parameters())


def shown(values: Tensor) -> Tensor:
    """All ranks', reliably: (world, n)."""
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    with lossycoll.reliable():
        dist.all_gather(rows, values)
    return torch.stack(rows)


def sweeps(rank: int) -> list[dict[str, Any]]:
    """After each sweep over ranks that each begin with their own number: which share of all
    elements is no rank's, and which differs between ranks."""
    weight = nn.Parameter(torch.full((ELEMENTS,), float(rank)))
    model = nn.Module()
    model.weight = weight
    optimizer = torch.optim.SGD([weight], lr=0.0)
    found = []
    with lossycoll.DriftBound(model, optimizer, PERIOD, repair=0) as bound:
        for _ in range(SWEEPS):
            weight.grad = torch.zeros(ELEMENTS)
            for _ in range(PERIOD):
                optimizer.step()
            bound.finish()
            rows = shown(weight.detach())
            shares = {
                "strange": ~torch.isin(rows, torch.arange(4.0)).all(0),
                "apart": (rows != rows[0]).any(0),
            }
            found.append({name: float(one.float().mean()) for name, one in shares.items()})
    return found


def truth(optimizer: Any) -> list[Tensor]:
    """What the owners have, by bucket."""
    out = [one.flat.clone() for one in optimizer._store.shards]
    for one in out:
        optimizer._collectives.all_gather_chunks(one).wait()
    return out


def bounded(rank: int, world: int) -> dict[str, Any]:
    """Every element always is what its owner had at most MAX_AGE steps ago, and replicas are equal
    when they are asked to be."""
    model = network(HIDDEN)
    mine = sharded(
        model.parameters(), torch.optim.AdamW, lr=0.003, max_age=MAX_AGE, bucket_bytes=BUCKET
    )
    history = [truth(mine)]
    losses = []
    for step in range(STEPS):
        mine.zero_grad()
        loss = loss_of(model, share(batch(step % 2, world), rank))
        loss.backward()
        mine.step()
        losses.append(loss.item())
        history.append(truth(mine))
        for number, one in enumerate(mine._store.shards):
            known = torch.stack([values[number] for values in history[-MAX_AGE - 1 :]])
            assert bool((known == one.flat).any(0).all()), (step, number)
    stale = mine.stats().stale
    mine.synchronize_parameters()
    rows = replicas(model)
    assert bool((rows == rows[0]).all())
    return {"stale": stale, "losses": losses}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("lossy")
    rank, world = dist.get_rank(), dist.get_world_size()
    said = {
        "hosts": lossycoll.topology().hosts,
        "sweeps": sweeps(rank),
        "sharded": bounded(rank, world),
        "missing": lossycoll.stats().packets_missing,
    }
    dist.barrier()
    dist.destroy_process_group()
    print("found", json.dumps(said))


if __name__ == "__main__":
    main()
