"""DeepSpeed's engine with ZeRO stage 2: accumulation, evaluation, a checkpoint, and a kill.

torchrun --nproc-per-node 2 --max-restarts 1 examples/deepspeed_zero.py

A rank is killed in the middle of the training, torchrun starts all again, and they go on from the
checkpoint. The weights' owners send them reliably, so replicas stay equal; LOSSYCOLL_MAX_MISSING
bounds what gradients lose. DriftBound refuses this engine: it steps copies of the parameters.
"""

from __future__ import annotations

import logging
import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import common
import deepspeed
import torch
import torch.distributed as dist

STEPS = 60
SAVED_AFTER, DIES_AFTER = 20, 30
MICRO_BATCHES = 2
CONFIG = {
    "train_micro_batch_size_per_gpu": 64,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 1 << 30,
}


def main() -> None:
    backend = common.backend()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Else DeepSpeed compiles an operator for CPUs here, which only its inference calls.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    network = common.network()
    engine, *_ = deepspeed.initialize(
        model=network,
        optimizer=torch.optim.Adam(network.parameters(), lr=5e-3),
        config=CONFIG,
    )
    held_out = common.Task(9).batch(256)
    before = common.loss(network, held_out).item()
    first = 0
    if common.scratch().exists():
        _, kept = engine.load_checkpoint(str(common.scratch()))
        first = kept["step"]
        assert common.loss(network, held_out).item() < 0.7 * before
    assert first == (SAVED_AFTER if common.attempt() else 0), first
    task = common.Task(dist.get_rank() + 100 * common.attempt())
    for step in range(first + 1, STEPS + 1):
        for _ in range(MICRO_BATCHES):
            engine.backward(common.loss(engine, task.batch()))
            engine.step()
        if step == SAVED_AFTER:
            engine.save_checkpoint(str(common.scratch()), client_state={"step": step})
        if step == DIES_AFTER:
            common.die_once()
    after = common.loss(network, held_out).item()
    assert after < 0.3 * before, (before, after)
    assert common.spread(common.parameters(network)) == 0, "replicas differ"
    lost = common.dropped()
    common.finish(
        f"went on from step {first}, evaluation loss {before:.3f} -> {after:.3f}, "
        f"replicas equal, {common.fingerprint(network)}, {lost}"
    )


if __name__ == "__main__":
    main()
