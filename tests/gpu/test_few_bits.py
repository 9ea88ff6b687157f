"""All-reduces in few bits that a GPU encodes: tests/gpu/few_bits.py, check by check."""

from __future__ import annotations

import pytest

from tests.gpu.checks import names_of, needs_gpu
from tests.gpu.runner import Found, run_table

pytestmark = [needs_gpu, pytest.mark.timeout(300)]

FEW_BITS = "tests.gpu.few_bits"


@pytest.fixture(scope="module")
def few_bits() -> dict[str, Found]:
    return run_table(FEW_BITS, env={"LOSSYCOLL_LOG": "warning"})


@pytest.mark.parametrize("name", names_of(FEW_BITS))
def test_few_bits(few_bits: dict[str, Found], name: str) -> None:
    few_bits[name].must_pass()
