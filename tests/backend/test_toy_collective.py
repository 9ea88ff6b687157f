"""A collective from outside the package, rotate.py, is one kind and a description."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import lossycoll
from lossycoll.backend.process_group import LossyProcessGroup
from tests.backend.rotate import rotate
from tests.support.harness import init, run_good


def rank_rotates(rank: int, world: int) -> str:
    init(timeout=20)
    group = dist.group.WORLD
    assert isinstance(group, LossyProcessGroup)
    for dtype in (torch.float32, torch.int64, torch.bool):
        for steps in range(world):
            # Neither lies in memory in order: the pipeline stages what the exchange needs.
            output = torch.zeros(40, 6, dtype=dtype)[:, ::2]
            work = rotate(group, output, torch.full((3, 40), rank, dtype=dtype).t(), steps)
            work.wait()
            assert (output == torch.tensor((rank - steps) % world).to(dtype)).all()
    work = rotate(group, torch.zeros(5), torch.full((5,), float(rank)), 1)
    assert work.get_future().wait()[0].tolist() == [(rank - 1) % world] * 5
    rotate(group, torch.zeros(0), torch.zeros(0), 1).wait()  # a barrier
    with pytest.raises(lossycoll.UnsupportedError, match=f"rank {rank}/{world}: rotate can't fill"):
        rotate(group, torch.zeros(1).expand(4), torch.zeros(4), 1)
    try:  # what ranks compare is checked too: a rank may have its own part before it hears of that
        rotate(group, torch.zeros(4), torch.zeros(4), 1 + rank % 2).wait()
        dist.barrier()
    except lossycoll.MismatchError as error:
        return str(error)
    return ""


def test_rotate() -> None:
    for text in run_good(rank_rotates, 3, {"LOSSYCOLL_LOG": "off"}):
        assert "rotate float32[4] by 1" in text
        assert "rotate float32[4] by 2" in text
