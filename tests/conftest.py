"""What holds for every test."""

from __future__ import annotations

import os

import pytest

# Before torch is imported: with more, the threads of a few processes wait for one another's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONG = ("test_native.py", "test_wheel.py", "test_oracle.py", "test_conformance.py")
"""Files that start first, so that at the end no worker is left alone with one of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
