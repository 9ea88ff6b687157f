"""A table of named checks, which ranks run one after another, and what a check is handed."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import fake_device

Run = Callable[["Rank"], None]

LIMIT_SECONDS = 40.0


@dataclass(frozen=True)
class Rank:
    """The rank that runs a check. ``device``: where its tensors are, "cuda:0" or "cpu"."""

    rank: int
    world: int
    device: str

    @property
    def cuda(self) -> bool:
        return self.device != "cpu"

    def full(self, shape: int | tuple[int, ...], value: float, **rest: Any) -> Tensor:
        shape = (shape,) if isinstance(shape, int) else shape
        return torch.full(shape, value, device=self.device, **{"dtype": torch.float32, **rest})

    def wait_for_device(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        else:
            fake_device.synchronize()


@dataclass(frozen=True)
class Check:
    """``limit``: seconds after which it hangs. ``cuda``: whether it is about what only CUDA has.

    ``long``: left out where a table runs in part.
    """

    name: str
    run: Run
    limit: float = LIMIT_SECONDS
    cuda: bool = False
    long: bool = False


@dataclass
class Table:
    """Checks by name, in the order in which they are run. ``init``: how their group is made."""

    checks: dict[str, Check] = field(default_factory=dict)
    init: dict[str, Any] = field(default_factory=dict)

    def add(self, check: Check) -> None:
        assert check.name not in self.checks, check.name
        self.checks[check.name] = check

    def check(
        self, *, limit: float = LIMIT_SECONDS, cuda: bool = False, long: bool = False
    ) -> Callable[[Run], Run]:
        """Adds the function that it decorates."""

        def add(run: Run) -> Run:
            self.add(Check(run.__name__, run, limit, cuda, long))
            return run

        return add


def table_of(module: str) -> Table:
    found = importlib.import_module(module).TABLE
    assert isinstance(found, Table)
    return found


def names_of(module: str) -> list[str]:
    return list(table_of(module).checks)


def has_cuda() -> bool:
    """Asked without the driver: a process that has initialized it can't be forked."""
    before = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if before is None:
            del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
        else:
            os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = before


needs_gpu = pytest.mark.skipif(not has_cuda(), reason="needs a GPU: torch.cuda isn't available")
