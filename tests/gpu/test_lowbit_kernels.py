"""Packets in few bits on a GPU: tests/gpu/lowbit_kernels.py, check by check."""

from __future__ import annotations

import pytest

from tests.gpu.checks import names_of, needs_gpu
from tests.gpu.runner import Found, run_table

pytestmark = [needs_gpu, pytest.mark.timeout(300)]

KERNELS = "tests.gpu.lowbit_kernels"


@pytest.fixture(scope="module")
def kernels() -> dict[str, Found]:
    return run_table(KERNELS, env={"LOSSYCOLL_LOG": "warning"})


@pytest.mark.parametrize("name", names_of(KERNELS))
def test_kernels(kernels: dict[str, Found], name: str) -> None:
    kernels[name].must_pass()
