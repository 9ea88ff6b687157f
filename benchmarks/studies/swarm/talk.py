"""A process on a host of the laboratory that is told lines of JSON, and says some."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.common.results import ROOT
from lossycoll.lab.laboratory import Lab

KEPT_ERRORS: Final = 200
"""Lines of what a process says besides."""


class Talking:
    """The process, and what it has said."""

    def __init__(
        self, lab: Lab, host: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.lines: list[dict[str, Any]] = []
        self.errors: list[str] = []
        common = {
            "OMP_NUM_THREADS": "1",
            "LOSSYCOLL_LOG": "warning",
            "LOSSYCOLL_LIVENESS": "60",  # all peers and their network share this machine's cores
            "PYTHONPATH": str(ROOT),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        self._process = lab.start(
            host, command, {**common, **environment}, stdin=-1, stdout=-1, stderr=-1, text=True
        )
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            try:
                self.lines.append(json.loads(line))
            except json.JSONDecodeError:
                self.errors.append(line)

    def _read_errors(self) -> None:
        for line in self._process.stderr or ():
            self.errors.append(line)
            del self.errors[:-KEPT_ERRORS]

    def tell(self, **what: Any) -> None:
        """Says it, unless the process has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def said(self, kind: str) -> list[dict[str, Any]]:
        """The lines of this kind."""
        return [line for line in list(self.lines) if line["kind"] == kind]

    def end(self) -> None:
        """Kills it with its children, and reads to the end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for thread in self._threads:
            thread.join(10)
