"""torch's pipeline parallelism: activations go from stage to stage by send and recv.

torchrun --nproc-per-node 4 --max-restarts 1 examples/pipeline.py

Two stages, and two replicas of each: the pipelines are one dimension of a mesh, and DDP's groups
the other. What stages send is reliable; only gradients between replicas lose packets, which
DriftBound holds together. A rank is killed in the middle of the training, torchrun starts all
again, and they go on from the distributed checkpoint, in which each stage has its own part.
"""

from __future__ import annotations

from typing import Any

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import lossycoll

STEPS, SAVED_AFTER, DIES_AFTER = 40, 15, 25
MICRO_BATCHES = 4
Batch = tuple[Tensor, Tensor]


def mean_loss(run: Any, place: int, batch: Batch) -> float:
    """Of a batch that goes through ``run``, in the last stage; 0 elsewhere."""
    if place == 0:
        run(batch[0])
        return 0.0
    losses: list[Tensor] = []
    run(target=batch[1], losses=losses)
    return float(torch.stack(losses).detach().mean())


def example() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    stages, replicas = mesh["pp"].get_group(), mesh["dp"].get_group()
    place = mesh["pp"].get_local_rank()
    layers = list(common.network())
    own = DistributedDataParallel(nn.Sequential(*layers[2 * place :][:2]), process_group=replicas)
    stage = PipelineStage(own, place, 2, torch.device("cpu"), group=stages)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(own.parameters(), lr=5e-3)
    if dist.get_backend() == "lossy":
        lossycoll.DriftBound(own, optimizer)

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(own, optimizer)
        return {f"stage {place}": {"model": weights, "optimizer": moments}}

    def evaluate() -> float:
        found = torch.tensor(mean_loss(schedule.eval, place, common.Task(9).batch()))
        dist.broadcast(found, src=1)  # a last stage
        return found.item()

    before = evaluate()
    first = SAVED_AFTER if common.attempt() else 0
    if first:
        kept = state()
        dcp.load(kept, checkpoint_id=common.scratch())
        (part,) = kept.values()
        set_state_dict(
            own, optimizer, model_state_dict=part["model"], optim_state_dict=part["optimizer"]
        )
        assert evaluate() < 0.7 * before
    task = common.Task(seed=mesh["dp"].get_local_rank() + 100 * first)
    for step in range(first + 1, STEPS + 1):
        optimizer.zero_grad()
        mean_loss(schedule.step, place, task.batch())
        optimizer.step()
        if step == SAVED_AFTER:
            dcp.save(state(), checkpoint_id=common.scratch())
        if step == DIES_AFTER:
            common.die_once()
    after = evaluate()
    assert after < 0.3 * before, (before, after)
    sent = "no packets dropped"
    if dist.get_backend() == "lossy":
        sent = common.dropped(replicas)
        assert lossycoll.stats(stages).packets_missing == 0
    return (
        f"went on from step {first}, evaluation loss {before:.3f} -> {after:.3f}, "
        f"{common.fingerprint(own)}, {sent} of gradients"
    )


if __name__ == "__main__":
    common.run(example)
