"""The field GF(2^8) and the Reed-Solomon parity of a set, in numpy.

native/gf.c and native/rs.c are the same to the byte, and a test holds them together;
docs/parity.md has the definitions. It is for tests and for readers: nothing on the way of a packet
uses it, and the reference executor only asks which packets come back.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

POLYNOMIAL: Final = 0x11D
Bytes = NDArray[np.uint8]


def _tables() -> tuple[Bytes, NDArray[np.int64]]:
    """Powers of 2, twice over, and their logarithms; that of 0 isn't used."""
    powers, logs = np.zeros(510, np.uint8), np.zeros(256, np.int64)
    power = 1
    for i in range(255):
        powers[i] = powers[i + 255] = power
        logs[power] = i
        power <<= 1
        power ^= POLYNOMIAL if power >> 8 else 0
    return powers, logs


_POWERS, _LOGS = _tables()


def times(a: Bytes, b: Bytes) -> Bytes:
    """The products of elements, by numpy's rules for shapes."""
    product: Bytes = np.where((a == 0) | (b == 0), 0, _POWERS[_LOGS[a] + _LOGS[b]]).astype(np.uint8)
    return product


def inverse(a: Bytes) -> Bytes:
    """1 / a; 0 of 0."""
    found: Bytes = np.where(a == 0, 0, _POWERS[255 - _LOGS[a]]).astype(np.uint8)
    return found


def factors(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Bytes:
    """The factors c(row, column); shape (rows, columns)."""
    x, y = rows.astype(np.uint8)[:, None], (255 - columns).astype(np.uint8)[None, :]
    first = inverse(np.array([255], np.uint8))
    scaled = times(times(x ^ np.uint8(255), first), y)
    return times(scaled, inverse(x ^ y))


def product(matrix: Bytes, packets: Bytes) -> Bytes:
    """Sums of packets times factors: shapes (m, k) and (k, bytes) give (m, bytes)."""
    out = np.zeros((len(matrix), packets.shape[1]), np.uint8)
    for column, packet in zip(matrix.T, packets, strict=True):
        out ^= times(column[:, None], packet[None, :])
    return out


def encode(packets: Bytes, rows: int) -> Bytes:
    """The first rows of a set; (k, bytes) gives (rows, bytes)."""
    return product(factors(np.arange(rows), np.arange(len(packets))), packets)


def solve(matrix: Bytes, right: Bytes) -> Bytes:
    """x of matrix x = right, shapes (e, e) and (e, bytes), by elimination.

    Raises:
        ValueError: The matrix has no inverse.
    """
    a: Bytes = matrix.copy()
    b: Bytes = right.copy()
    for at in range(len(a)):
        pivots = np.flatnonzero(a[at:, at]) + at
        if not len(pivots):
            raise ValueError(f"row {at} of {len(a)} depends on those above, wanted an inverse")
        for both in (a, b):
            both[[at, pivots[0]]] = both[[pivots[0], at]]
        scale = inverse(a[at, at : at + 1])
        a[at], b[at] = times(a[at], scale), times(b[at], scale)
        others = a[:, at].copy()
        others[at] = 0
        a ^= times(others[:, None], a[at][None, :])
        b ^= times(others[:, None], b[at][None, :])
    return b


def restore(
    packets: Bytes, missing: NDArray[np.int64], rows: Bytes, which: NDArray[np.int64]
) -> Bytes:
    """The missing packets of a set; shape (e, bytes).

    Args:
        packets: Shape (k, bytes); those at ``missing`` aren't read.
        missing: Shape (e,): the columns that lack.
        rows: Shape (e, bytes): parity that arrived.
        which: Shape (e,): what rows of the set these are.
    """
    there = np.setdiff1d(np.arange(len(packets)), missing)
    rest: Bytes = rows ^ product(factors(which, there), packets[there])
    return solve(factors(which, missing), rest)
