"""Peers of a swarm for each test here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from lossycoll import Swarm
from tests.support.swarms import Make, made_in


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def made(stack: ExitStack) -> Make:
    """Makes the peers of one swarm."""
    return partial(made_in, stack)


@pytest.fixture
def swarms(made: Make) -> list[Swarm]:
    return made(3)


@pytest.fixture
def swarm(made: Make) -> Swarm:
    return made(1)[0]
