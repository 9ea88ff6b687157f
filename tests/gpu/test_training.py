"""Training and loss on a GPU: tests/gpu/training.py and losses.py, check by check."""

from __future__ import annotations

import pytest

from tests.gpu.checks import names_of, needs_gpu
from tests.gpu.runner import Found, run_table

pytestmark = [needs_gpu, pytest.mark.timeout(300)]

TRAINING, LOSSES = "tests.gpu.training", "tests.gpu.losses"
QUIET = {"LOSSYCOLL_LOG": "off"}


@pytest.fixture(scope="module")
def training() -> dict[str, Found]:
    return run_table(TRAINING, env=QUIET)


@pytest.fixture(scope="module")
def losses() -> dict[str, Found]:
    return run_table(LOSSES, env=QUIET)


@pytest.mark.parametrize("name", names_of(TRAINING))
def test_training(training: dict[str, Found], name: str) -> None:
    training[name].must_pass()


@pytest.mark.parametrize("name", names_of(LOSSES))
def test_loss(losses: dict[str, Found], name: str) -> None:
    losses[name].must_pass()
