"""A pool of host memory that a device reaches: taken once, used again, never given back.

What is given back to the driver while copies are under way may wait for all of them (NCCL's issue
48), and what is taken anew at every call costs more than the copy.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from torch import Tensor

LEAST: Final = 4096
"""Bytes of the smallest piece."""


class HostMemory:
    """Pieces of a few sizes, each a power of two or one and a half times that.

    ``make``: makes a piece of so many bytes, a uint8 tensor.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.pieces = 0
        """How many were made."""

    def take(self, nbytes: int) -> Tensor:
        """A piece of ``nbytes`` or more, until :meth:`give_back`; its contents are anything."""
        size = size_of(nbytes)
        with self._lock:
            if self._free[size]:
                return self._free[size].pop()
            self.pieces += 1
        return self._make(size)

    def give_back(self, piece: Tensor) -> None:
        """Has the piece used again; nothing may read or write it any more."""
        with self._lock:
            self._free[piece.numel()].append(piece)


def size_of(nbytes: int) -> int:
    """The size of the piece that ``nbytes`` bytes get."""
    size = LEAST
    while size < nbytes:
        if size * 3 // 2 >= nbytes:
            return size * 3 // 2
        size *= 2
    return size
