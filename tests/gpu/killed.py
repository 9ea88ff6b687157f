"""What ranks do until one of them is killed; tests/gpu/test_failures.py kills it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from tests.support.failure_cases import Caught
from tests.support.harness import init, note

DEVICE = "GPU_DEVICE"


@dataclass
class Survived:
    """What is left at a rank. ``synchronized``: time.monotonic() when the device had done all."""

    caught: Caught
    synchronized: float
    usable: bool


def rank_until_a_loss(rank: int, world: int) -> Survived:
    """Keeps copies both ways in flight, of one chunk and of several."""
    import torch
    import torch.distributed as dist

    import lossycoll
    from lossycoll import _autoload

    _autoload.register()
    device = os.environ[DEVICE]
    init(timeout=60)
    small, large = (torch.ones(size, device=device) for size in (200_000, 12_000_000))
    caught = Caught("", "", None, 0.0)
    works = []
    for count in range(10**9):
        try:
            works = [dist.all_reduce(t, async_op=True) for t in (small, large, small)]
            if count % 2:
                works[-1].wait()
            if count % 4 == 3:
                for work in works:
                    work.wait()
                if device != "cpu":
                    torch.cuda.synchronize()
            large.fill_(1)
        except lossycoll.LossyError as error:
            caught = Caught(type(error).__name__, str(error), error.peer, time.monotonic())
            break
        if count == 10:
            note("ready")
    del works
    if device != "cpu":
        torch.cuda.synchronize()
    synchronized = time.monotonic()
    small.fill_(3)
    x = torch.eye(32, device=device)
    usable = small.sum().item() == 3 * small.numel() and torch.equal(x @ x, x)
    dist.destroy_process_group()
    return Survived(caught, synchronized, bool(usable))
