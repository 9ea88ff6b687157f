"""Samples of what the long suite tries whole, as parameters of tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest


def pairs(first: Iterable[object], second: Iterable[object], every: int = 2) -> Iterator[Any]:
    """Each of ``first`` with each of ``second``. The short suite has one pair of ``every``, and in
    them all of either that has so many."""
    for (a, one), (b, other) in product(enumerate(first), enumerate(second)):
        yield pytest.param(one, other, marks=pytest.mark.long if (a + b) % every else ())


def some(values: Iterable[object], every: int) -> Iterator[Any]:
    """The short suite has the first of each ``every``."""
    for at, value in enumerate(values):
        yield pytest.param(value, marks=pytest.mark.long if at % every else ())
