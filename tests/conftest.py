"""What holds for every test."""

from __future__ import annotations

import os

import pytest

# Before torch is imported: with more, the threads of a few processes wait for one another's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SECONDS = {
    "test_native.py": 125,
    "test_oracle.py": 100,
    "test_theory.py": 95,
    "test_examples.py": 85,
    "test_failures_leave.py": 75,
    "test_conformance.py": 60,
    "test_faults.py": 60,
    "test_bench.py": 60,
    "test_reference.py": 55,
    "test_lab_links.py": 50,
    "test_demo.py": 46,
    "test_wheel.py": 45,
    "test_continue.py": 40,
    "test_deadlines.py": 40,
    "test_guide.py": 36,
    "test_surface.py": 35,
    "test_arc_topk_ranks.py": 32,
    "test_dropcompute_loss.py": 31,
    "test_doctor.py": 31,
    "test_lab_life.py": 30,
    "test_sharded.py": 30,
    "test_drift_sharded.py": 25,
    "test_backend.py": 25,
    "test_bench_nccl.py": 22,
    "test_failures_kill.py": 20,
}
"""Files that take long, and about how long on two cores with another one beside.

The longest start first, so that at the end no worker is left alone with one of them.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: -SECONDS.get(item.path.name, 0))
