"""What the examples share: start and end of a job, a small task to learn, and figures."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lossycoll

FEATURES = 64
HIDDEN = 256  # 131 KiB of gradient: tensors below 16 KiB are always sent reliably


def run(example: Callable[[], str]) -> None:
    """Joins the job that torchrun has started, runs ``example`` and prints what it returns.

    An example raises when its own check fails, which ends the process with a status other than 0.
    """
    dist.init_process_group(backend=backend())
    finish(example())


def finish(summary: str) -> None:
    """Prints ``summary`` once, removes the job's checkpoints and leaves the job."""
    dist.barrier()
    if dist.get_rank() == 0:
        if scratch().exists():
            shutil.rmtree(scratch())
        print(f"{Path(sys.argv[0]).stem}: {summary}", flush=True)
    # DDP's wrapper is part of a reference cycle. While it lives, so do gloo's threads, and those
    # can abort the process while the interpreter is going down.
    gc.collect()
    dist.destroy_process_group()


def backend() -> str:
    """The backend that the command line asks for. LOSSYCOLL_REPLACE doesn't hold for gloo."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="lossy", choices=["lossy", "gloo"])
    found: str = parser.parse_args().backend
    if found == "gloo":
        lossycoll.stop_replacing()
    torch.manual_seed(0)
    return found


def attempt() -> int:
    """0, or how often torchrun has started all ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def scratch() -> Path:
    """The job's folder for checkpoints, the same in all attempts."""
    name = f"{Path(sys.argv[0]).stem}-{os.environ.get('TORCHELASTIC_RUN_ID', os.getppid())}"
    return Path(tempfile.gettempdir()) / name


def die_once() -> None:
    """Kills the last rank here in the first attempt, if torchrun may start all again."""
    may = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if may and attempt() == 0 and dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)


def fingerprint(model: nn.Module) -> str:
    """A hash of all parameters, to compare one backend's with another's."""
    raw = parameters(model).float().contiguous().numpy().tobytes()
    return f"parameters #{blake2b(raw, digest_size=6).hexdigest()}"


def network(hidden: int = HIDDEN) -> nn.Module:
    """The same first weights on every rank and in every run."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, FEATURES), nn.Tanh()
    )


class Task:
    """Batches of a function to learn. What is drawn depends on ``seed`` (a rank, say) alone."""

    def __init__(self, seed: int) -> None:
        self._truth = (
            torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(0))
            / FEATURES**0.5
        )
        self._draws = torch.Generator().manual_seed(1 + seed)

    def batch(self, rows: int = 64) -> tuple[Tensor, Tensor]:
        """(inputs, targets), both float32[rows, FEATURES]; targets have a variance of about 0.4."""
        inputs = torch.randn(rows, FEATURES, generator=self._draws)
        return inputs, torch.tanh(inputs @ self._truth)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    """One step of training on ``batch`` (inputs, targets); returns its loss."""
    found = loss(model, batch)
    optimizer.zero_grad()
    found.backward()
    optimizer.step()
    return found.item()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean squared error on ``batch`` (inputs, targets)."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def parameters(model: nn.Module) -> Tensor:
    """All of them, one after another, float32[n]; all ranks take part where they are sharded."""
    wholes = [getattr(one, "full_tensor", one.detach)() for one in model.parameters()]
    return torch.cat([one.detach().flatten() for one in wholes])


def spread(tensor: Tensor) -> float:
    """The largest difference between any two ranks' elements; copies are never lossy."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    rows = torch.stack(gathered)
    return float((rows.amax(0) - rows.amin(0)).max())


def dropped(*groups: dist.ProcessGroup) -> str:
    """How many packets were lost on purpose, over all ranks, in ``groups`` (or the default one).

    Asserts that there were some, if LOSSYCOLL_INJECT has asked for it.
    """
    if dist.get_backend() != "lossy":
        return "no packets dropped"
    own = sum(lossycoll.stats(group).packets_injected for group in groups or [None])
    total = torch.tensor(own)
    dist.all_reduce(total)  # an integer: never lossy
    assert total > 0 or not os.environ.get("LOSSYCOLL_INJECT"), "nothing was lost"
    return f"{total} packets dropped"
