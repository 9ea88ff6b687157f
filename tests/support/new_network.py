"""Programs that need a network of their own: what they do to it, or see of it, is theirs alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEW_NETWORK = ["unshare", "--map-root-user", "--net"]


def run_in_a_new_network(*module: str, timeout: float = 60) -> None:
    """Runs a module with arguments in a network namespace, of which not even loopback is up.

    The test is skipped where there can be none.
    """
    if subprocess.run([*NEW_NETWORK, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system gives no network namespace")
    done = subprocess.run(
        [*NEW_NETWORK, sys.executable, "-m", *module],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
