"""Runs the C tests of tests/native: plain, under ASan and UBSan, under TSan, and the two fuzzers.

A C compiler is a requirement of the project, so its absence is a failure and not a skip.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parent


@pytest.mark.parametrize("target", ["test", "asan", "tsan", "fuzz"])
def test_make(target: str) -> None:
    done = subprocess.run(
        ["make", "-C", str(NATIVE), target, "FUZZ_SECONDS=5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout
