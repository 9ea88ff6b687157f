"""Which models DropCompute refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lossycoll
from tests.support.dropcompute_cases import small

M = 4


def test_models_of_which_it_can_not_be_done_are_refused() -> None:
    optimizer = torch.optim.SGD(small().parameters(), lr=1.0)
    for model, said in (
        (optimizer, "was given a SGD; wanted: a module"),
        (nn.Sequential(small(), nn.SyncBatchNorm(2)), "1 is a SyncBatchNorm"),
    ):
        with pytest.raises(lossycoll.UnsupportedError, match=said):
            lossycoll.DropCompute(model, M)  # type: ignore[arg-type]
