"""What holds for every test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported: with more, the threads of a few processes wait for one another's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

TESTS = Path(__file__).resolve().parent

SECONDS = {
    "native/test_native.py": 125,
    "runtime/engine/test_oracle.py": 100,
    "benchmarks/test_theory.py": 95,
    "repository/test_examples.py": 85,
    "failures/test_leave.py": 75,
    "conformance/test_conformance.py": 60,
    "backend/test_faults.py": 60,
    "cli/bench/test_command.py": 60,
    "plan/test_reference_executor.py": 55,
    "lab/test_links.py": 50,
    "cli/demo/test_command.py": 46,
    "repository/test_wheel.py": 45,
    "backend/test_survivors.py": 40,
    "benchmarks/test_deadlines.py": 40,
    "repository/test_guide.py": 36,
    "backend/test_surface.py": 35,
    "train/compress/test_arc_topk_ranks.py": 32,
    "train/dropcompute/test_loss.py": 31,
    "cli/doctor/test_command.py": 31,
    "lab/test_life.py": 30,
    "train/sharded/test_optimizer.py": 30,
    "train/drift/test_sharded_models.py": 25,
    "backend/test_process_group.py": 25,
    "cli/bench/test_nccl.py": 22,
    "failures/test_kill.py": 20,
}
"""Files that take long, and about how long on two cores with another one beside.

The longest start first, so that at the end no worker is left alone with one of them.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: -SECONDS.get(str(item.path.relative_to(TESTS)), 0))
