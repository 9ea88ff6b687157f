"""What simulate/ does without."""

from __future__ import annotations

import subprocess
import sys


def test_no_torch_is_needed() -> None:
    code = "import sys, lossycoll.simulate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
