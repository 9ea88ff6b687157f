"""A rank dies and torchrun starts all of them again, from the last checkpoint.

torchrun --nproc-per-node 2 --max-restarts 1 examples/restart.py

The survivors hear of the death at once, by an error that names the rank. torchrun's store lives on
with the keys of the first attempt in it; lossy doesn't believe them, gloo fails on them.
"""

import os
import signal
import tempfile
from pathlib import Path

import common
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 40
DIES_AFTER = 25
SAVES_EVERY = 10


def example() -> str:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # The name of the job is the same on all attempts.
    saved = Path(tempfile.gettempdir()) / f"restart-{os.environ['TORCHELASTIC_RUN_ID']}.pt"
    model = DistributedDataParallel(common.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    assert first == (20 if attempt else 0), (attempt, first)

    losses = []
    task = common.Task(seed=dist.get_rank() + 100 * attempt)
    for step in range(first + 1, STEPS + 1):
        losses.append(common.step(model, optimizer, task.batch()))
        if step % SAVES_EVERY == 0:
            if dist.get_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step}, saved)
            dist.barrier()
        if step == DIES_AFTER and attempt == 0 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    assert losses[-1] < losses[0] < 0.4, losses
    lost = common.dropped()
    if dist.get_rank() == 0:
        saved.unlink()
    return f"attempt {attempt + 1} went on from step {first}, loss {losses[-1]:.3f}, {lost}"


if __name__ == "__main__":
    common.run(example)
