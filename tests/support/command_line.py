"""The command line in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping


def run_lossycoll(
    *words: str, python: str = sys.executable, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``lossycoll WORDS``. ``python``: an interpreter; ``env``: all of its environment."""
    return subprocess.run(
        [python, "-m", "lossycoll.cli", *words],
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
        env=env,
    )
