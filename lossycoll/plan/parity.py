"""Forward error correction: which packets of a stream its parity packets bring back.

A stream of n packets is followed by P = ceil(n / size) parity packets. Packet k belongs to set
k mod P, and parity packet j is the XOR of set j: it brings back one missing packet of it.
native/fec.c does it, and has the same table of sizes.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

SIZES: Final = (
    *(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20),
    *(25, 30, 35, 40, 50, 60, 70, 80, 100, 125, 150, 200, 250, 300, 400, 500),
)
"""Packets that one parity packet protects, by the code on the wire; 0 is none."""
LEAST_SHARE: Final = 1 / SIZES[-1]
AUTO_SIZE: Final = 4
"""The smallest set that fec="auto" makes: no more than a quarter is parity."""


def size_of(share: float) -> int:
    """The size of sets whose parity is nearest to ``share`` of the packets; 0 for none."""
    if share <= 0:
        return 0
    return min(SIZES[1:], key=lambda size: abs(math.log(size * share)))


def parity_count(size: int, n_packets: int) -> int:
    """Parity packets of a stream of ``n_packets``."""
    return -(-n_packets // size) if size else 0


def recover(
    missing: NDArray[np.bool_], void: NDArray[np.bool_], came: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Which packets come back; bool, shape (n_packets,).

    Args:
        missing: Shape (n_packets,): packets that are not there.
        void: Shape (n_packets,): packets that were never sent, since nobody had contributed to
            them. They count as zeros, and nothing brings them.
        came: Shape (parity packets,): which of these arrived.
    """
    if not len(came):
        return np.zeros_like(missing)
    of_set = np.arange(len(missing)) % len(came)
    one_missing = np.bincount(of_set, missing, len(came)) == 1
    back: NDArray[np.bool_] = missing & (one_missing & came)[of_set] & ~void
    return back
