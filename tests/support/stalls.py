"""Whether the machine stood still while a test that depends on time ran."""

from __future__ import annotations

import threading
import time


class Stalls:
    """A ``with`` block; ``longest``: seconds that a thread which only sleeps woke up too late."""

    EVERY = 0.01

    def __init__(self) -> None:
        self.longest = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stalls", daemon=True)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        begin = time.monotonic()
        while not self._stop.wait(self.EVERY):
            now = time.monotonic()
            self.longest = max(self.longest, now - begin - self.EVERY)
            begin = now
