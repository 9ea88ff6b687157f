"""A torch store in this process's memory."""

from __future__ import annotations

import threading


class MemoryStore:
    """A store among threads. ``broken``: what every call raises."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.broken: Exception | None = None
        self._lock = threading.Lock()

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken

    def set(self, key: str, value: str) -> None:
        """As torch's."""
        self._check()
        with self._lock:
            self.data[key] = value.encode()

    def get(self, key: str) -> bytes:
        """As torch's, of a key that is there."""
        self._check()
        return self.data[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """As torch's, of keys that are there."""
        return [self.get(key) for key in keys]

    def add(self, key: str, value: int) -> int:
        """As torch's."""
        self._check()
        with self._lock:
            total = int(self.data.get(key, b"0")) + value
            self.data[key] = str(total).encode()
            return total

    def check(self, keys: list[str]) -> bool:
        """As torch's."""
        self._check()
        return all(key in self.data for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As torch's: "" expects a key that isn't there."""
        self._check()
        with self._lock:
            if self.data.get(key, b"").decode() == expected:
                self.data[key] = desired.encode()
            return self.data[key]
