"""Ray Train's TorchTrainer: a worker dies, Ray starts the group again from a checkpoint.

python examples/ray_fit.py
KILLS=0 python examples/ray_fit.py --backend gloo

This process is the launcher: it starts Ray on this machine, and two workers that train with DDP.
DriftBound holds the replicas together. Without the kill the hashes of two backends can be compared.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "240")  # for busy machines

import common
import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

import lossycoll

STEPS, SAVED_AFTER, DIES_AFTER = 40, 10, 15
MICRO_BATCHES = 2
KILLS = int(os.environ.get("KILLS", "1"))


def train(config: dict[str, Any]) -> dict[str, str]:
    rank = ray.train.get_context().get_world_rank()
    network = common.network()
    model = prepare_model(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
    if dist.get_backend() == "lossy":
        lossycoll.DriftBound(model, optimizer)
    held_out, first = common.Task(9).batch(256), 0
    before = common.loss(network, held_out).item()
    kept = ray.train.get_checkpoint()
    if kept is not None:
        with kept.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        assert first == SAVED_AFTER
    task = common.Task(seed=rank + 100 * first)
    for step in range(first + 1, STEPS + 1):
        optimizer.zero_grad()
        with model.no_sync():
            for _ in range(MICRO_BATCHES - 1):
                common.loss(model, task.batch()).backward()
        common.loss(model, task.batch()).backward()
        optimizer.step()
        if step == SAVED_AFTER:
            with tempfile.TemporaryDirectory() as folder:
                state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step}, Path(folder) / "state.pt")
                made = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
                ray.train.report({"step": step}, checkpoint=made)
        if config["kills"] and step == DIES_AFTER and first == 0 and rank == 1:
            # Ray's controller takes note of it later than the workers report it.
            assert ray.train.get_all_reported_checkpoints()
            os.kill(os.getpid(), signal.SIGKILL)
    after = common.loss(network, held_out).item()
    assert after < 0.3 * before, (before, after)
    summary = (
        f"went on from step {first}, evaluation loss {before:.3f} -> {after:.3f}, "
        f"{common.fingerprint(network)}, {common.dropped()}"
    )
    return {"backend": dist.get_backend(), "summary": summary}


def main() -> None:
    backend = common.backend()
    # Workers on this machine inherit this process's variables, lossycoll's among them; others need
    # runtime_env={"env_vars": {...}}.
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
    )
    with tempfile.TemporaryDirectory() as folder:
        found = TorchTrainer(
            train,
            train_loop_config={"kills": KILLS},
            torch_config=TorchConfig(backend=backend),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(
                storage_path=folder,
                failure_config=ray.train.FailureConfig(max_failures=1),
            ),
        ).fit()
    ray.shutdown()
    result = found.return_value  # rank 0's; found.metrics are those of the last checkpoint
    assert result["backend"] == backend, result
    print(f"ray_fit: {result['summary']}", flush=True)


if __name__ == "__main__":
    main()
