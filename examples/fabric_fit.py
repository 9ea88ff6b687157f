"""Lightning Fabric: a loop of one's own, accumulation, a checkpoint, and a resume after a kill.

torchrun --nproc-per-node 2 --max-restarts 1 examples/fabric_fit.py

Fabric makes the process group itself. A rank is killed in the middle of the training, torchrun
starts all again, and they go on from the checkpoint that ``fabric.save`` has written. DriftBound
holds the replicas together.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import common
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DDPStrategy

import lossycoll

STEPS, SAVED_AFTER, DIES_AT = 60, 20, 40
MICRO_BATCHES = 2


def train(fabric: Fabric) -> str:
    network = common.network()
    model, optimizer = fabric.setup(network, torch.optim.Adam(network.parameters(), lr=0.005))
    if dist.get_backend() == "lossy":
        lossycoll.DriftBound(model, optimizer)
    task, held_out = common.Task(fabric.global_rank), common.Task(9).batch(256)
    before = common.loss(network, held_out).item()
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    kept = common.scratch() / "state.ckpt"
    if kept.exists():
        fabric.load(kept, state)
        assert common.loss(network, held_out).item() < before
    first = state["step"]
    assert bool(first) == bool(common.attempt())
    for step in range(STEPS):
        # Also those before the checkpoint: they are drawn in this order.
        batches = [task.batch(32) for _ in range(MICRO_BATCHES)]
        if step < first:
            continue
        optimizer.zero_grad()
        for number, batch in enumerate(batches, 1):
            with fabric.no_backward_sync(model, enabled=number < MICRO_BATCHES):
                fabric.backward(common.loss(model, batch) / MICRO_BATCHES)
        optimizer.step()
        if step + 1 == SAVED_AFTER:
            fabric.save(kept, {**state, "step": step + 1})
        if step == DIES_AT:
            common.die_once()
    after = float(fabric.all_reduce(common.loss(network, held_out).detach(), reduce_op="mean"))
    assert after < 0.5 * before, (before, after)
    return (
        f"went on from step {first}, evaluation loss {before:.3f} -> {after:.3f}, "
        f"{common.fingerprint(network)}"
    )


def reduce(fabric: Fabric) -> None:
    """What Fabric reduces: a mean of integers is one that is truncated, as NCCL's is."""
    rank, world = fabric.global_rank, fabric.world_size
    total = fabric.all_reduce(torch.tensor(float(rank)), reduce_op="sum")
    assert total == sum(range(world)), total
    if dist.get_backend() == "lossy":
        counts = torch.tensor([rank + 1, -rank - 1])
        dist.all_reduce(counts, dist.ReduceOp.AVG)
        mean = sum(range(1, world + 1)) // world
        assert counts.tolist() == [mean, -mean], counts


def main() -> None:
    backend = common.backend()
    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    fabric = Fabric(
        accelerator="cpu",
        devices=TorchElasticEnvironment().world_size(),
        strategy=DDPStrategy(process_group_backend=backend),
    )
    fabric.launch()
    assert dist.get_backend() == backend
    summary = train(fabric)
    reduce(fabric)
    common.finish(f"{summary}, {common.dropped()}")


if __name__ == "__main__":
    main()
