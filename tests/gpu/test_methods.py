"""Methods of training on a GPU: tests/gpu/methods.py, check by check."""

from __future__ import annotations

import pytest

from tests.gpu.checks import names_of, needs_gpu
from tests.gpu.runner import Found, run_table

pytestmark = [needs_gpu, pytest.mark.timeout(300)]

METHODS = "tests.gpu.methods"


@pytest.fixture(scope="module")
def methods() -> dict[str, Found]:
    return run_table(METHODS, env={"LOSSYCOLL_LOG": "off"})


@pytest.mark.parametrize("name", names_of(METHODS))
def test_method(methods: dict[str, Found], name: str) -> None:
    methods[name].must_pass()
