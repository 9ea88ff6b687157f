"""Two peers of a swarm, of which one writes checkpoints to a small disk until it is full.

``python -m tests.support.full_disk FOLDER``, in a mount namespace of its own, in which FOLDER
becomes that disk.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lossycoll import MoshpitAverager, MoshpitSGD, Swarm
from lossycoll.errors import CheckpointError

DISK = 256 * 1024
ROUNDS = 6
FULL_AFTER = 3


def train(swarm: Swarm, folder: Path | None, said: list[Any]) -> None:
    """Appends the rounds' reports, and checks the disk where there is a folder."""
    model = nn.Linear(100, 200)
    averager = MoshpitAverager(swarm, model.parameters(), grid=(2,))
    optimizer = MoshpitSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), averager)
    swarm.wait_for(peers=2, timeout=30)
    for number in range(ROUNDS):
        optimizer.zero_grad()
        model(torch.ones(100)).square().mean().backward()
        said.append(optimizer.step())
        if folder is None:
            continue
        checkpoint = folder / "latest.pt"
        if number < FULL_AFTER:
            assert optimizer.save(checkpoint) == checkpoint.stat().st_size
            kept = [p.detach().clone() for p in model.parameters()]
        else:
            # The rest of the disk is the checkpoint's.
            (folder / "filler").write_bytes(bytes(DISK // 2))
            with pytest.raises(CheckpointError, match=r"No space left on device.*is as it was"):
                optimizer.save(checkpoint)
    if folder is not None:
        assert sorted(path.name for path in folder.iterdir()) == ["filler", "latest.pt"]
        optimizer.load(checkpoint)
        for parameter, before in zip(model.parameters(), kept, strict=True):
            assert torch.equal(parameter, before)


def main() -> None:
    folder = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], check=True)
    with (
        Swarm("127.0.0.1:0", name="0") as first,
        Swarm(join=[first.address], name="1") as second,
    ):
        own: list[Any] = []
        others: list[Any] = []
        other = threading.Thread(target=train, args=(second, None, others))
        other.start()
        train(first, folder, own)
        other.join()
    for report in (*own, *others):
        assert (report.failure, report.kept, len(report.members)) == ("", 0.0, 2)
    assert len(own) == len(others) == ROUNDS


if __name__ == "__main__":
    main()
