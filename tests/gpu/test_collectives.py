"""Collectives and order on a GPU: tests/gpu/collectives.py and streams.py, check by check."""

from __future__ import annotations

import pytest

from tests.gpu.checks import names_of, needs_gpu
from tests.gpu.runner import Found, run_table

pytestmark = [needs_gpu, pytest.mark.timeout(300)]

COLLECTIVES, STREAMS = "tests.gpu.collectives", "tests.gpu.streams"
QUIET = {"LOSSYCOLL_LOG": "warning"}


@pytest.fixture(scope="module")
def collectives() -> dict[str, Found]:
    return run_table(COLLECTIVES, env=QUIET)


@pytest.fixture(scope="module")
def streams() -> dict[str, Found]:
    return run_table(STREAMS, env=QUIET)


@pytest.mark.parametrize("name", names_of(COLLECTIVES))
def test_collective(collectives: dict[str, Found], name: str) -> None:
    collectives[name].must_pass()


@pytest.mark.parametrize("name", names_of(STREAMS))
def test_order(streams: dict[str, Found], name: str) -> None:
    streams[name].must_pass()
