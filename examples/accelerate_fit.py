"""accelerate's own loop: accumulation, evaluation, a checkpoint, and a resume after a kill.

LOSSYCOLL_REPLACE=gloo torchrun --nproc-per-node 2 --max-restarts 1 examples/accelerate_fit.py

accelerate asks for gloo on CPUs. A rank is killed in the middle of the training, torchrun starts
all again, and they go on from the checkpoint. DriftBound holds the replicas together.
"""

from __future__ import annotations

import common
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import lossycoll

EPOCHS = 4
SAVED_AFTER = 2
ROWS, BATCH, MICRO_BATCHES = 2048, 32, 2


def main() -> None:
    common.backend()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    network = common.network()
    model, optimizer, loader = accelerator.prepare(
        network,
        torch.optim.Adam(network.parameters(), lr=5e-3),
        DataLoader(TensorDataset(*common.Task(0).batch(ROWS)), BATCH),
    )
    if dist.get_backend() == "lossy":
        lossycoll.DriftBound(model, optimizer)
    held_out = common.Task(9).batch(256)
    before = common.loss(network, held_out).item()
    first = 0
    if common.scratch().exists():
        accelerator.load_state(str(common.scratch()))
        first = SAVED_AFTER
        assert common.loss(network, held_out).item() < 0.7 * before
    assert bool(first) == bool(common.attempt())
    for epoch in range(first, EPOCHS):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(common.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
        if epoch == SAVED_AFTER - 1:
            accelerator.save_state(str(common.scratch()))
            accelerator.wait_for_everyone()
        if epoch == SAVED_AFTER:
            common.die_once()
    own = common.loss(network, held_out).detach()
    after = float(accelerator.reduce(own, "mean"))
    assert after < 0.3 * before, (before, after)
    lost = common.dropped()
    common.finish(
        f"went on from epoch {first}, evaluation loss {before:.3f} -> {after:.3f}, "
        f"{common.fingerprint(network)}, {lost}"
    )


if __name__ == "__main__":
    main()
