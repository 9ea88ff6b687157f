"""The checks of streams.py for a process that torch's sanitizer watches, and one that it works."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import streams
from tests.gpu.checks import Check, Rank, Table

TABLE = Table(dict(streams.TABLE.checks), streams.TABLE.init)


def _race(rank: Rank) -> None:
    from torch.cuda._sanitizer import CUDASanitizerErrors, cuda_sanitizer

    assert cuda_sanitizer.enabled
    t = rank.full(1000, 1.0)
    with pytest.raises(CUDASanitizerErrors), torch.cuda.stream(torch.cuda.Stream()):
        t.mul_(2)
    torch.cuda.synchronize()


TABLE.add(Check("the_sanitizer_sees_a_race", _race, cuda=True))
