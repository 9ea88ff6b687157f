"""A TCP store in a process of its own, which can be frozen."""

from __future__ import annotations

import signal
import subprocess
import sys

SERVE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class StoreServer:
    """Serves from when it is made until ``close``."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVE], stdin=pipe, stdout=pipe, text=True
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def freeze(self) -> None:
        """It takes connections and questions, and answers none."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """SIGKILL. Idempotent."""
        self._process.kill()
        self._process.communicate()
