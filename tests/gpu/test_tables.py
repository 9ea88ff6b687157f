"""Checks on a GPU: the ranks go through a table once, and each of its checks is a test."""

from __future__ import annotations

import pytest

from tests.gpu.checks import names_of, needs_gpu
from tests.gpu.runner import Found, run_table

pytestmark = [needs_gpu, pytest.mark.timeout(300)]

LEVELS = {
    **dict.fromkeys(("collectives", "streams", "few_bits", "lowbit_kernels"), "warning"),
    **dict.fromkeys(("methods", "training", "losses"), "off"),
}
"""Tables, modules beside this one, and what their ranks may log."""
CHECKS = [(table, name) for table in LEVELS for name in names_of(f"tests.gpu.{table}")]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Found]:
    table: str = request.param
    return run_table(f"tests.gpu.{table}", env={"LOSSYCOLL_LOG": LEVELS[table]})


@pytest.mark.parametrize(("found", "name"), CHECKS, indirect=["found"])
def test_check(found: dict[str, Found], name: str) -> None:
    found[name].must_pass()
